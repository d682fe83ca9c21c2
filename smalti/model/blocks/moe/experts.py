"""The experts: weights and computation, without dropped tokens (MegaBlocks, arXiv:2211.15841).

Guarantees: no host synchronisation with the ``grouped`` kernel; gathers and reductions have a fixed order, so the same
input gives the same bits; any width.

Shapes: N tokens, D hidden, E experts, k experts per token, S slots (a token at one of its experts, sorted by
expert), F intermediate width of an expert, n tokens of one expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.config.model import ModelConfig
from smalti.cost.memory.experts import row_multiple
from smalti.model.blocks.mlp import activation

_ALIGNED = 8
"""``grouped_mm`` needs widths that are multiples of this: rows of 16 bytes, 8 values of bfloat16."""


class Experts(nn.Module):
    """The experts of a layer, with weights [E, F, D] like DBRX's w1, v1, w2.

    So conversion is a view, and ``grouped_mm`` needs no copy: it reads gate and up transposed, and down as it is.
    """

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
        self.num_local_experts = config.moe.num_experts
        for weight_EFD in self.parameters():
            nn.init.normal_(weight_EFD, std=config.initializer_range)

    def forward(self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, pending: Any = None) -> Tensor:
        """Return sum_k weight_k * expert_k(x): [N, D] -> [N, D].

        ``pending``: the result of ``exchange_counts`` for these choices.
        """
        return self.compute(x_ND, expert_Nk, weight_Nk)

    def exchange_counts(self, expert_Nk: Tensor) -> Any:
        """Exchange the row counts of these choices between ranks, and return ``pending`` for ``forward``.

        Does nothing for experts on one rank; for more, ``distributed/parallel/dispatch.py`` has a subclass.
        """
        return None

    def part(self, name: str) -> Tensor:
        """Return a parameter; of one that is split over ranks, a subclass returns this rank's part."""
        parameter: Tensor = getattr(self, name)
        return parameter

    def weights(self) -> "Weights":
        """Return the weights of the experts that this module computes."""
        gate = None if self.gate_proj is None else self.part("gate_proj")
        return Weights(gate, self.part("up_proj"), self.part("down_proj"))

    def compute(
        self,
        x_ND: Tensor,
        expert_Nk: Tensor,
        weight_Nk: Tensor | None,
        *,
        has_unassigned_rows: bool = False,
    ) -> Tensor:
        """Compute ``forward`` for the experts of ``weights``, whose number is E here.

        ``weight_Nk`` None: every choice has weight 1. ``has_unassigned_rows``: some choices are E, which is no expert;
        their output is 0.
        """
        kernel = {"grouped": _grouped, "loop": _loop}[self.kernel]
        return kernel(self, x_ND, expert_Nk, weight_Nk, self.weights(), has_unassigned_rows)


class Weights(NamedTuple):
    """Weights of some experts, each [E, F, D]."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


def _loop(
    experts: Experts,
    x_ND: Tensor,
    expert_Nk: Tensor,
    weight_Nk: Tensor | None,
    weights: Weights,
    has_unassigned_rows: bool,
) -> Tensor:
    """Compute expert after expert, the naive reference; synchronises with the device."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(weights.up.shape[0]):
        token, slot = torch.where(expert_Nk == expert)
        x_nD = x_ND[token]
        inner_nF = x_nD @ weights.up[expert].T
        if weights.gate is None:
            inner_nF = experts.activation(inner_nF)
        else:
            inner_nF = experts.activation(x_nD @ weights.gate[expert].T) * inner_nF
        out_nD = inner_nF @ weights.down[expert]
        if weight_Nk is not None:
            out_nD = out_nD * weight_Nk[token, slot, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, out_nD)
    return out_ND


def _grouped(
    experts: Experts,
    x_ND: Tensor,
    expert_Nk: Tensor,
    weight_Nk: Tensor | None,
    weights: Weights,
    has_unassigned_rows: bool,
) -> Tensor:
    """Compute all experts with one grouped matrix product per weight, on slots sorted by expert."""
    width = x_ND.shape[1]
    gate, up, down = _padded(weights.gate), _padded(weights.up), _padded(weights.down)
    assert up is not None
    multiple = 1 if weight_Nk is None else row_multiple(expert_Nk.numel(), len(up), x_ND.device.type, x_ND.itemsize)
    arguments: tuple[Any, ...] = (
        F.pad(x_ND, (0, -width % _ALIGNED)) if width % _ALIGNED else x_ND,
        weight_Nk,
        gate,
        up,
        down,
        *slots(expert_Nk, len(up), multiple),
        experts.activation,
        has_unassigned_rows,
    )
    if torch.is_grad_enabled():
        out_ND: Tensor = _Grouped.apply(experts.activation_backward, *arguments)
    else:  # the autograd node alone takes 45 us on a CPU, as much as one grouped product of a decode step
        out_ND = _run(*arguments).out_ND
    return out_ND[:, :width]


def _padded(weight_EFD: Tensor | None) -> Tensor | None:
    """Pad with zeros to widths that ``grouped_mm`` accepts, which changes no result; copies only if needed."""
    if weight_EFD is None:
        return None
    inner, width = (-size % _ALIGNED for size in weight_EFD.shape[1:])
    return F.pad(weight_EFD, (0, width, 0, inner)) if inner or width else weight_EFD


def grouped(x_SI: Tensor, weight_EIO: Tensor, end_E: Tensor) -> Tensor:
    """Return the product of each expert's rows with its matrix, [S, O]; widths of any size."""
    outputs = weight_EIO.shape[2]
    inputs_padded = _padded(weight_EIO)
    assert inputs_padded is not None
    missing = inputs_padded.shape[1] - x_SI.shape[1]
    out_SO = F.grouped_mm(F.pad(x_SI, (0, missing)) if missing else x_SI, inputs_padded, offs=end_E)
    return out_SO[:, :outputs] if out_SO.shape[1] != outputs else out_SO


def slots(expert_Nk: Tensor, num_experts: int, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert, without waiting for the device.

    Returns order_S, the flat choice n * k + j in each slot; slot_Nk, the slot of each choice; and end_E int32, the slot
    after each expert's last. Without padding the last end is S = N * k, as ``grouped_mm`` writes no rows after it;
    choices of E or above are after it.

    ``multiple``: pad the slots of each expert to a multiple of it. S is then N * k + E (multiple - 1), the last end at
    most S, and order_S is 0 for slots without a choice.
    """
    expert_S, order_S = expert_Nk.flatten().sort(stable=True)
    labels_E = torch.arange(num_experts, device=expert_S.device)
    end_E = torch.searchsorted(expert_S, labels_E, right=True, out_int32=True)
    place_S = torch.arange(order_S.shape[0], device=order_S.device)
    if multiple > 1:
        count_E = end_E.diff(prepend=end_E.new_zeros(1))
        padded_E = (count_E + (multiple - 1)) // multiple * multiple
        place_S += ((padded_E - count_E).cumsum(0) - (padded_E - count_E)).index_select(0, expert_S)
        end_E = padded_E.cumsum(0, dtype=torch.int32)
    slot_S = torch.empty_like(order_S).scatter_(0, order_S, place_S)
    if multiple > 1:
        padded_S = order_S.new_zeros(order_S.shape[0] + num_experts * (multiple - 1))
        order_S = padded_S.index_copy_(0, place_S, order_S)
    return order_S, slot_S.view_as(expert_Nk), end_E


class _Forward(NamedTuple):
    """What the forward pass computes and the backward pass reads."""

    out_ND: Tensor
    y_SD: Tensor
    gate_SF: Tensor | None
    up_SF: Tensor
    unwritten_S1: Tensor | None


def _run(
    x_ND: Tensor,
    weight_Nk: Tensor | None,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    order_S: Tensor,
    slot_Nk: Tensor,
    end_E: Tensor,
    act: Callable[[Tensor], Tensor],
    has_unassigned_rows: bool,
) -> _Forward:
    x_SD = x_ND.index_select(0, order_S // slot_Nk.shape[1])
    up_SF = F.grouped_mm(x_SD, up.mT, offs=end_E)
    gate_SF = None if gate is None else F.grouped_mm(x_SD, gate.mT, offs=end_E)
    inner_SF = act(up_SF) if gate_SF is None else act(gate_SF).mul_(up_SF)
    y_SD = F.grouped_mm(inner_SF, down, offs=end_E)
    unwritten_S1 = unused_slots(end_E, order_S) if has_unassigned_rows else None
    clear(y_SD, unwritten_S1)
    return _Forward(bag(y_SD, slot_Nk, weight_Nk), y_SD, gate_SF, up_SF, unwritten_S1)


class _Grouped(torch.autograd.Function):
    """The sum over each token's experts, as one autograd node; without weights of the choices each has weight 1.

    Rows move between tokens and slots by ``bag``: on a CPU one pass gathers, scales and adds, in the order of a token's
    choices and in float32, without a scaled [S, D] copy or a scatter. Saved for backward, besides input and choices:
    gate, up (S F each) and the experts' output (S D); the rest is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, act_backward: Callable[[Tensor, Tensor], Tensor], *arguments: Any) -> Tensor:
        *tensors, act, _ = arguments
        forward = _run(*arguments)
        saved_SD = None if tensors[1] is None else forward.y_SD
        ctx.save_for_backward(*tensors, forward.gate_SF, forward.up_SF, saved_SD)
        ctx.act, ctx.act_backward, ctx.unwritten_S1 = act, act_backward, forward.unwritten_S1
        return forward.out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_Nk, gate, up, down, order_S, slot_Nk, end_E, gate_SF, up_SF, y_SD = ctx.saved_tensors
        token_S = order_S // slot_Nk.shape[1]
        if weight_Nk is None:
            grad_SD, grad_weight_Nk = grad_ND.index_select(0, token_S), None
        else:
            grad_SD, grad_weight_Nk = bag_backward(grad_ND, y_SD, order_S, slot_Nk, weight_Nk)
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
        grad_x_ND = bag(clear(F.grouped_mm(grad_up_SF, up, offs=end_E), ctx.unwritten_S1), slot_Nk)
        grad_up = F.grouped_mm(grad_up_SF.mT, x_SD, offs=end_E)
        grad_gate = None
        if grad_gate_SF is not None:
            grad_x_ND += bag(clear(F.grouped_mm(grad_gate_SF, gate, offs=end_E), ctx.unwritten_S1), slot_Nk)
            grad_gate = F.grouped_mm(grad_gate_SF.mT, x_SD, offs=end_E)
        return None, grad_x_ND, grad_weight_Nk, grad_gate, grad_up, grad_down, *(None,) * 5


def unused_slots(end_E: Tensor, order_S: Tensor) -> Tensor:
    """Return [S, 1], True for slots after the last expert's, which ``grouped_mm`` does not write."""
    return (torch.arange(order_S.shape[0], device=order_S.device) >= end_E[-1])[:, None]


def clear(rows_SD: Tensor, unwritten_S1: Tensor | None) -> Tensor:
    return rows_SD if unwritten_S1 is None else rows_SD.masked_fill_(unwritten_S1, 0)


def bag(rows_RD: Tensor, index_Nk: Tensor, weight_Nk: Tensor | None = None) -> Tensor:
    """Return [N, D], the sum over k of the rows at ``index_Nk``, each times its weight.

    ``embedding_bag`` does it in one pass and float32 on a CPU, but is slow on a GPU. There rows are scaled in their own
    dtype and added in float32, in one kernel if it is compiled (not with an axis ``expert``).
    """
    weight_Nk = None if weight_Nk is None else weight_Nk.to(rows_RD.dtype)
    if rows_RD.is_cuda:
        if index_Nk.shape[1] == 1:
            picked_ND = rows_RD.index_select(0, index_Nk[:, 0])
            return picked_ND if weight_Nk is None else picked_ND * weight_Nk
        picked_NkD = rows_RD.index_select(0, index_Nk.flatten()).view(*index_Nk.shape, -1)
        return (picked_NkD if weight_Nk is None else picked_NkD * weight_Nk[..., None]).sum(1)
    return F.embedding_bag(index_Nk, rows_RD, mode="sum", per_sample_weights=weight_Nk)


def bag_backward(
    grad_ND: Tensor, rows_SD: Tensor, order_S: Tensor, slot_Nk: Tensor, weight_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``bag(rows_SD, slot_Nk, weight_Nk)`` for rows and weights; ``order_S`` is from
    ``slots``."""
    token_S = order_S // slot_Nk.shape[1]
    weight_S = weight_Nk.new_zeros(order_S.shape).index_copy_(0, slot_Nk.flatten(), weight_Nk.flatten())
    grad_weight_S = torch.linalg.vecdot(rows_SD, grad_ND.index_select(0, token_S)).to(weight_Nk.dtype)
    grad_SD = bag(grad_ND, token_S[:, None], weight_S[:, None])
    return grad_SD, grad_weight_S.index_select(0, slot_Nk.flatten()).view_as(weight_Nk)


_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}
"""(gradient of the output, input) -> gradient of the input, of each activation."""
