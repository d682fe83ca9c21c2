"""The experts: their weights, and every token through its k of them, none dropped (MegaBlocks, arXiv:2211.15841).

Promises: no host synchronisation with the ``grouped`` kernel; forward and backward are gathers and reductions in a
fixed order, so the same input gives the same bits.

Shapes: N tokens, D hidden, E experts, k experts per token, S = N * k slots (a token at one of its experts), F width
inside an expert, n the tokens of one expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.model.blocks.mlp import activation


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
        for weight_EFD in self.parameters():
            nn.init.normal_(weight_EFD, std=config.initializer_range)

    def forward(self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        """sum_k weight_k * expert_k(x): [N, D] -> [N, D]."""
        kernel = {"grouped": _grouped, "loop": _loop}[self.kernel]
        return kernel(self, x_ND, expert_Nk, weight_Nk)


def _loop(experts: Experts, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """The naive reference, expert after expert; synchronises with the device and takes any width."""
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
    top_k = expert_Nk.shape[1]
    expert_S, order_S = expert_Nk.flatten().sort(stable=True)
    slot_S = torch.empty_like(order_S)
    slot_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    slot_Nk = slot_S.view(-1, top_k)
    token_S = order_S // top_k
    labels_E = torch.arange(experts.up_proj.shape[0], device=expert_S.device)
    end_E = torch.searchsorted(expert_S, labels_E, right=True, out_int32=True)

    x_SD = _Permute.apply(x_ND, token_S, slot_Nk)
    inner_SF = F.grouped_mm(x_SD, experts.up_proj.transpose(-2, -1), offs=end_E)
    if experts.gate_proj is None:
        inner_SF = experts.activation(inner_SF)
    else:
        inner_SF = experts.activation(F.grouped_mm(x_SD, experts.gate_proj.transpose(-2, -1), offs=end_E)) * inner_SF
    y_SD = F.grouped_mm(inner_SF, experts.down_proj, offs=end_E)
    out_ND: Tensor = _Combine.apply(y_SD, weight_Nk, token_S, order_S, slot_Nk)
    return out_ND


class _Permute(torch.autograd.Function):
    """Tokens to slots: a gather; backward gathers each token's k slots and adds them in order (no scatter-add)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_S: Tensor, slot_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(slot_Nk)
        return x_ND.index_select(0, token_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (slot_Nk,) = ctx.saved_tensors
        return _gather(grad_SD, slot_Nk).sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    """Slots to tokens: out = sum over a token's slots of weight * y; all gathers, in both directions."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, weight_Nk: Tensor, token_S: Tensor, order_S: Tensor, slot_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(y_SD, weight_Nk, token_S, order_S, slot_Nk)
        weight_N1k = weight_Nk.to(y_SD.dtype)[:, None, :]
        return (weight_N1k @ _gather(y_SD, slot_Nk)).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_SD, weight_Nk, token_S, order_S, slot_Nk = ctx.saved_tensors
        weight_S1 = weight_Nk.to(grad_ND.dtype).flatten().index_select(0, order_S)[:, None]
        grad_SD = grad_ND.index_select(0, token_S) * weight_S1
        grad_Nk = (_gather(y_SD, slot_Nk) @ grad_ND[:, :, None]).squeeze(2).to(weight_Nk.dtype)
        return grad_SD, grad_Nk, None, None, None


def _gather(rows_SD: Tensor, slot_Nk: Tensor) -> Tensor:
    """Rows of each token's slots, [N, k, D]."""
    return rows_SD.index_select(0, slot_Nk.flatten()).view(*slot_Nk.shape, rows_SD.shape[1])
