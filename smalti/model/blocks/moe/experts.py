"""The experts: their weights, and every token through its k of them, none dropped (MegaBlocks, arXiv:2211.15841).

Promises: no host synchronisation with the ``grouped`` kernel; forward and backward are gathers and reductions in a
fixed order, so the same input gives the same bits; any width. The kernel keeps for backward, beside its input and the
choices: gate, up (S F each) and the experts' output (S D); what lies between is computed again.

Shapes: N tokens, D hidden, E experts, k experts per token, S = N * k slots (a token at one of its experts, sorted by
expert), F width inside an expert, n the tokens of one expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.model.blocks.mlp import activation

_ALIGNED = 8
"""Widths that ``grouped_mm`` takes are multiples of this: it wants rows of 16 bytes, 8 values of bfloat16."""


class Experts(nn.Module):
    """The experts' weights, all stored [E, F, D] like DBRX's w1, v1, w2, so that converting is a view and no kernel
    needs a copy: ``grouped_mm`` takes the transposed view of gate and up, and down as it is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        shape = (config.moe.num_experts, config.expert_width, config.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(shape)) if config.gated else None
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape))
        self.kernel = config.moe.kernel
        self.activation = activation(config)
        self.activation_backward = _BACKWARD[config.activation]
        for weight_EFD in self.parameters():
            nn.init.normal_(weight_EFD, std=config.initializer_range)

    def forward(self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        """sum_k weight_k * expert_k(x): [N, D] -> [N, D]."""
        kernel = {"grouped": _grouped, "loop": _loop}[self.kernel]
        return kernel(self, x_ND, expert_Nk, weight_Nk)


def _loop(experts: Experts, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """The naive reference, expert after expert; synchronises with the device."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(experts.up_proj.shape[0]):
        token, slot = torch.where(expert_Nk == expert)
        mine_nD = x_ND[token]
        inner_nF = mine_nD @ experts.up_proj[expert].T
        if experts.gate_proj is None:
            inner_nF = experts.activation(inner_nF)
        else:
            inner_nF = experts.activation(mine_nD @ experts.gate_proj[expert].T) * inner_nF
        out_nD = (inner_nF @ experts.down_proj[expert]) * weight_Nk[token, slot, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, out_nD)
    return out_ND


def _grouped(experts: Experts, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """All experts in one grouped matmul per weight, on slots sorted by expert."""
    width = x_ND.shape[1]
    gate, up, down = (_padded(weight) for weight in (experts.gate_proj, experts.up_proj, experts.down_proj))
    out_ND: Tensor = _Grouped.apply(
        F.pad(x_ND, (0, -width % _ALIGNED)) if width % _ALIGNED else x_ND,
        weight_Nk,
        gate,
        up,
        down,
        *slots(expert_Nk, experts.up_proj.shape[0]),
        experts.activation,
        experts.activation_backward,
    )
    return out_ND[:, :width]


def _padded(weight_EFD: Tensor | None) -> Tensor | None:
    """With zeros up to widths that ``grouped_mm`` takes; they change no result. A copy, where there is need."""
    if weight_EFD is None:
        return None
    inner, width = (-size % _ALIGNED for size in weight_EFD.shape[1:])
    return F.pad(weight_EFD, (0, width, 0, inner)) if inner or width else weight_EFD


def slots(expert_Nk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order_S, the flat choice n * k + j in each slot, by expert and then in order; slot_Nk, where each choice went;
    end_E int32, the slot after each expert's last. No wait for the device. The last end is S: no slot is left over,
    whose row ``grouped_mm`` would leave unwritten."""
    expert_S, order_S = expert_Nk.flatten().sort(stable=True)
    slot_S = torch.empty_like(order_S)
    slot_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    labels_E = torch.arange(num_experts, device=expert_S.device)
    end_E = torch.searchsorted(expert_S, labels_E, right=True, out_int32=True)
    return order_S, slot_S.view_as(expert_Nk), end_E


class _Grouped(torch.autograd.Function):
    """x, weights of the choices and weights of the experts to the sum over each token's experts; one autograd node.

    Rows move between tokens and slots by ``embedding_bag``, which gathers, scales and adds in one pass, in the order of
    a token's choices and in float32; so no [S, D] copy is scaled or summed apart, and nothing is added by scatter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_Nk: Tensor,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        order_S: Tensor,
        slot_Nk: Tensor,
        end_E: Tensor,
        act: Callable[[Tensor], Tensor],
        act_backward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        x_SD = x_ND.index_select(0, order_S // slot_Nk.shape[1])
        up_SF = F.grouped_mm(x_SD, up.mT, offs=end_E)
        gate_SF = None if gate is None else F.grouped_mm(x_SD, gate.mT, offs=end_E)
        inner_SF = act(up_SF) if gate_SF is None else act(gate_SF).mul_(up_SF)
        y_SD = F.grouped_mm(inner_SF, down, offs=end_E)
        ctx.save_for_backward(x_ND, weight_Nk, gate, up, down, order_S, slot_Nk, end_E, gate_SF, up_SF, y_SD)
        ctx.act, ctx.act_backward = act, act_backward
        return _bag(y_SD, slot_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_Nk, gate, up, down, order_S, slot_Nk, end_E, gate_SF, up_SF, y_SD = ctx.saved_tensors
        token_S = order_S // slot_Nk.shape[1]
        weight_S = weight_Nk.flatten().index_select(0, order_S)
        grad_weight_S = torch.linalg.vecdot(y_SD, grad_ND.index_select(0, token_S)).to(weight_Nk.dtype)
        grad_SD = _bag(grad_ND, token_S[:, None], weight_S[:, None])
        x_SD = x_ND.index_select(0, token_S)

        grad_inner_SF = F.grouped_mm(grad_SD, down.mT, offs=end_E)
        active_SF = ctx.act(up_SF if gate is None else gate_SF)
        if gate is None:
            grad_down = F.grouped_mm(active_SF.mT, grad_SD, offs=end_E)
            grad_gate_SF, grad_up_SF = None, ctx.act_backward(grad_inner_SF, up_SF)
        else:
            grad_down = F.grouped_mm((active_SF * up_SF).mT, grad_SD, offs=end_E)
            grad_up_SF = active_SF.mul_(grad_inner_SF)
            grad_gate_SF = ctx.act_backward(grad_inner_SF.mul_(up_SF), gate_SF)
        grad_x_ND = _bag(F.grouped_mm(grad_up_SF, up, offs=end_E), slot_Nk)
        grad_up = F.grouped_mm(grad_up_SF.mT, x_SD, offs=end_E)
        grad_gate = None
        if grad_gate_SF is not None:
            grad_x_ND += _bag(F.grouped_mm(grad_gate_SF, gate, offs=end_E), slot_Nk)
            grad_gate = F.grouped_mm(grad_gate_SF.mT, x_SD, offs=end_E)
        grad_weight_Nk = grad_weight_S.index_select(0, slot_Nk.flatten()).view_as(weight_Nk)
        return grad_x_ND, grad_weight_Nk, grad_gate, grad_up, grad_down, None, None, None, None, None


def _bag(rows_RD: Tensor, index_Nk: Tensor, weight_Nk: Tensor | None = None) -> Tensor:
    """[N, D]: sum over k of the rows at ``index_Nk``, each times its weight."""
    weight_Nk = None if weight_Nk is None else weight_Nk.to(rows_RD.dtype)
    return F.embedding_bag(index_Nk, rows_RD, mode="sum", per_sample_weights=weight_Nk)


_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}
"""(gradient of the output, input) -> gradient of the input, of each activation."""
