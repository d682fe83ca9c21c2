"""All-to-all of tokens to the ranks of their experts and back: modules that replace a layer's ``Experts``.

Shapes: N tokens of this rank, D hidden, k experts per token, S = N * k slots sorted by expert (as in
``model/blocks/moe/experts.py``), W ranks, E experts, e = E / W on each rank, C rows of a pair of ranks at most,
P = W * C rows of a buffer, R rows received.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from smalti.distributed.parallel.dtensors import local
from smalti.model.blocks.moe.experts import Experts, bag, bag_backward, slots


@dataclass
class PendingDispatch:
    """Slots of some choices and the row counts being exchanged.

    Not a tuple, so that FSDP does not look for tensors in it.
    """

    order_S: Tensor
    slot_Nk: Tensor
    end_E: Tensor
    """Last slot of each expert, plus one. These three are the results of ``slots``."""
    receive_We: Tensor
    """Rows from each rank for each expert of this one, int64."""
    sizes: "Sizes | None"
    """Rows to and from each rank, being copied to the host."""


class Sizes:
    """Asynchronous copy of a small table to the host."""

    def __init__(self, table: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._table = table
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True).copy_(table, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[list[int]]:
        """Wait for the copy and return the table. No other call of a training step waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._table.tolist()  # type: ignore[no-any-return]


class LocalExperts(Experts):
    """Replaces ``experts`` and takes over all that it has: computes with this rank's part of DTensors."""

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(experts))

    def part(self, name: str) -> Tensor:
        """Return this rank's part of a parameter."""
        return local(super().part(name))


class Dispatch(LocalExperts):
    """Base class of the two modes. Replaces ``experts``, of which each rank of ``group`` holds an equal part.

    Both compute what one process with all experts does, forward and backward, except for the order of sums; no token is
    dropped.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        super().__init__(experts)
        self.group, self.ranks, self.local_rank = group, group.size(), group.rank()
        self.num_local_experts = experts.num_local_experts // self.ranks

    @torch._disable_dynamo
    def exchange_counts(self, expert_Nk: Tensor) -> PendingDispatch:
        """Sort the choices by expert, and exchange the number of rows for each expert between the ranks."""
        order_S, slot_Nk, end_E = slots(expert_Nk, self.num_local_experts * self.ranks)
        send_We = F.pad(end_E.to(torch.int64), (1, 0)).diff().view(self.ranks, self.num_local_experts)
        receive_We = _all_to_all(send_We, None, None, self.group)
        return PendingDispatch(order_S, slot_Nk, end_E, receive_We, self.sizes(send_We, receive_We))

    @torch._disable_dynamo
    def forward(
        self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, pending: PendingDispatch | None = None
    ) -> Tensor:
        """Return the same as ``Experts.forward``, for the experts of all ranks."""
        return self.dispatch_and_combine(x_ND, weight_Nk, pending or self.exchange_counts(expert_Nk))

    def sizes(self, send_We: Tensor, receive_We: Tensor) -> Sizes | None:
        """Return the row counts that the host must know, if any."""
        return None

    def dispatch_and_combine(self, x_ND: Tensor, weight_Nk: Tensor, pending: PendingDispatch) -> Tensor:
        """Send rows to the ranks of their experts, and return the weighted sum of what these compute, [N, D]."""
        raise NotImplementedError

    def run_local_experts(self, rows_RD: Tensor, label_R: Tensor, *, has_unassigned_rows: bool) -> Tensor:
        """Compute the output [R, D] of this rank's experts; ``label_R`` has the expert of each row.

        ``has_unassigned_rows``: some labels are the number of experts: padding rows, whose output is 0.
        """
        return self.compute(rows_RD, label_R[:, None], None, has_unassigned_rows=has_unassigned_rows)


class ExactDispatch(Dispatch):
    """Dispatch that sends exactly the chosen rows.

    The host must know how many, and waits for one small copy per layer, as late as possible.
    """

    assumes_even_load = False
    """Assume the same number of rows for each rank: for tracing a step whose tensors have no values."""

    def sizes(self, send_We: Tensor, receive_We: Tensor) -> Sizes | None:
        return None if self.assumes_even_load else Sizes(torch.stack([send_We.sum(dim=1), receive_We.sum(dim=1)]))

    def dispatch_and_combine(self, x_ND: Tensor, weight_Nk: Tensor, pending: PendingDispatch) -> Tensor:
        rows_SD: Tensor = _GatherRows.apply(x_ND, pending.order_S, pending.slot_Nk, None, 0)
        send_counts, receive_counts = self._even(rows_SD.shape[0]) if pending.sizes is None else pending.sizes.wait()
        received = sum(receive_counts)
        rows_RD = _all_to_all(rows_SD, receive_counts, send_counts, self.group)
        del rows_SD  # frees memory while the experts compute
        label_R = _labels(pending.receive_We.flatten(), received) % self.num_local_experts
        if received == 0:  # a row of no expert: every kernel takes it, and its gradients are zeros
            rows_RD, label_R = F.pad(rows_RD, (0, 0, 0, 1)), label_R.new_full((1,), self.num_local_experts)
        y_RD = self.run_local_experts(rows_RD, label_R, has_unassigned_rows=received == 0)[:received]
        returned_SD = _all_to_all(y_RD, send_counts, receive_counts, self.group)
        del rows_RD, y_RD
        return _CombineRows.apply(returned_SD, weight_Nk, pending.order_S, pending.slot_Nk, None)

    def _even(self, slots: int) -> list[list[int]]:
        shares = [slots // self.ranks + (rank < slots % self.ranks) for rank in range(self.ranks)]
        return [shares, [shares[self.local_rank]] * self.ranks]


class StaticDispatch(Dispatch):
    """Dispatch in buffers of the worst case: all tokens of a rank choose experts of one other rank.

    It never waits for the device. All ranks must have the same number of tokens.
    """

    def dispatch_and_combine(self, x_ND: Tensor, weight_Nk: Tensor, pending: PendingDispatch) -> Tensor:
        max_rows = x_ND.shape[0] * min(weight_Nk.shape[1], self.num_local_experts)
        buffer_row_S = self._buffer_rows(pending, max_rows)
        rows_PD: Tensor = _GatherRows.apply(x_ND, pending.order_S, pending.slot_Nk, buffer_row_S, self.ranks * max_rows)
        label_P = _labels(pending.receive_We, max_rows).flatten()  # rows after the last received one have no expert
        received_PD = _all_to_all(rows_PD, None, None, self.group)
        del rows_PD
        y_PD = self.run_local_experts(received_PD, label_P, has_unassigned_rows=True)
        returned_PD = _all_to_all(y_PD, None, None, self.group)
        del received_PD, y_PD
        return _CombineRows.apply(returned_PD, weight_Nk, pending.order_S, pending.slot_Nk, buffer_row_S)

    def _buffer_rows(self, pending: PendingDispatch, max_rows: int) -> Tensor:
        """Return the row [S] of each slot in the buffer; the rows for a rank are at the beginning of its part."""
        end_W = pending.end_E.view(self.ranks, -1)[:, -1].to(torch.int64)
        begin_W = F.pad(end_W[:-1], (1, 0))
        slot_S = torch.arange(pending.order_S.shape[0], device=end_W.device)
        shift_W = torch.arange(self.ranks, device=end_W.device) * max_rows - begin_W
        return slot_S + shift_W.index_select(0, torch.searchsorted(end_W, slot_S, right=True))


def _all_to_all(
    rows: Tensor, receive_counts: list[int] | None, send_counts: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """Exchange parts of ``rows`` between all ranks, with a gradient; without counts, in equal parts."""
    exchange = collectives.all_to_all_single_autograd
    received = exchange(rows, receive_counts, send_counts, group)  # type: ignore[no-untyped-call]
    return collectives.wait_tensor(received)  # type: ignore[no-any-return]


def _labels(counts: Tensor, rows: int) -> Tensor:
    """Return the group index [..., rows] of each row; rows after the last group get the number of groups."""
    row = torch.arange(rows, device=counts.device).expand(*counts.shape[:-1], rows).contiguous()
    return torch.searchsorted(counts.cumsum(dim=-1), row, right=True)


class _GatherRows(torch.autograd.Function):
    """Gathers the rows of the slots: [S, D], or [P, D] with each at its row of a buffer that is zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, order_S: Tensor, slot_Nk: Tensor, buffer_row_S: Tensor | None, buffer_rows: int
    ) -> Tensor:
        ctx.save_for_backward(slot_Nk, buffer_row_S)
        rows_SD = x_ND.index_select(0, order_S // slot_Nk.shape[1])
        return rows_SD if buffer_row_S is None else _scatter_rows(rows_SD, buffer_row_S, buffer_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slot_Nk, buffer_row_S = ctx.saved_tensors
        buffer_row_Nk = (
            slot_Nk if buffer_row_S is None else buffer_row_S.index_select(0, slot_Nk.flatten()).view_as(slot_Nk)
        )
        return bag(grad, buffer_row_Nk), None, None, None, None


class _CombineRows(torch.autograd.Function):
    """Sums each token's k rows, in the order of ``_GatherRows``, times their weights: [N, D]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight_Nk: Tensor, order_S: Tensor, slot_Nk: Tensor, buffer_row_S: Tensor | None
    ) -> Tensor:
        rows_SD = rows if buffer_row_S is None else rows.index_select(0, buffer_row_S)
        ctx.save_for_backward(rows_SD, weight_Nk, order_S, slot_Nk, buffer_row_S)
        ctx.buffer_rows = rows.shape[0]
        return bag(rows_SD, slot_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows_SD, weight_Nk, order_S, slot_Nk, buffer_row_S = ctx.saved_tensors
        grad_SD, grad_weight_Nk = bag_backward(grad_ND, rows_SD, order_S, slot_Nk, weight_Nk)
        grad = grad_SD if buffer_row_S is None else _scatter_rows(grad_SD, buffer_row_S, ctx.buffer_rows)
        return grad, grad_weight_Nk, None, None, None


def _scatter_rows(rows_SD: Tensor, buffer_row_S: Tensor, buffer_rows: int) -> Tensor:
    return rows_SD.new_zeros(buffer_rows, rows_SD.shape[1]).index_copy_(0, buffer_row_S, rows_SD)
