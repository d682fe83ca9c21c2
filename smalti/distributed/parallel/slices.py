"""Collectives with gradients over the ranks of the axis ``tensor``, which hold equal slices of tensors.

Each function makes one collective in forward and one in backward, with the larger buffer that
``cost/layout/collectives.py`` counts, and never waits for the device. The right gradient depends on what the ranks
compute from the result, so each function states what it assumes.

Shapes: B rows, T tokens of a row, t those of this rank's slice, W ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional
"""Collectives that ``torch.compile`` can trace, under names that torch 2.11 and later share."""


@dataclass(frozen=True)
class Ranks:
    """The ranks over which each matrix is split, and this rank's number among them."""

    name: str
    """Name of the process group, as torch's functional collectives and its compiler take it."""
    size: int
    local_rank: int

    @staticmethod
    def of(axis: DeviceMesh) -> "Ranks":
        """Return the ranks of a mesh of one dim."""
        return Ranks(axis.get_group().group_name, axis.size(), axis.get_local_rank())


def all_gather_sequence(x_BtD: Tensor, ranks: Ranks) -> Tensor:
    """All-gather [B, t, D] -> [B, T, D]. Backward reduce-scatters, as each rank computes another part from it."""
    out: Tensor = _AllGatherSequence.apply(x_BtD, ranks)
    return out


def reduce_scatter_sequence(part_BTD: Tensor, ranks: Ranks) -> Tensor:
    """Reduce-scatter [B, T, D], a part of a sum, -> [B, t, D], this rank's slice of the sum over the ranks."""
    out: Tensor = _ReduceScatterSequence.apply(part_BTD, ranks)
    return out


def all_gather_replicated(part: Tensor, ranks: Ranks) -> Tensor:
    """All-gather along the last dim, [..., d] -> [..., W d].

    Backward takes this rank's slice, since all ranks compute the same from the result.
    """
    out: Tensor = _AllGatherReplicated.apply(part, ranks)
    return out


def all_reduce(part: Tensor, ranks: Ranks) -> Tensor:
    """Sum over the ranks. Backward sums the gradients too, since each rank computes another part from the result."""
    out: Tensor = _AllReduce.apply(part, ranks)
    return out


def scale_gradient(x: Tensor, ranks: Ranks) -> Tensor:
    """Identity in forward; divides the gradient by W, because the W ranks compute the same and it is summed later."""
    out: Tensor = _ScaleGradient.apply(x, ranks) if x.requires_grad else x
    return out


def all_gather_stacked(part: Tensor, ranks: Ranks) -> Tensor:
    """All-gather along a new first dim, [...] -> [W, ...]; without a gradient."""
    return _gather(part[None], ranks, 0)


def _gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name))
    if x.shape[:dim].numel() == 1:  # the slices of one row are consecutive already
        return parts.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(parts.chunk(ranks.size), dim=dim)


def _scatter(x_BTD: Tensor, ranks: Ranks) -> Tensor:
    batch, _, width = x_BTD.shape
    slices = x_BTD if batch == 1 else torch.cat(x_BTD.chunk(ranks.size, dim=1))
    rows = slices.reshape(ranks.size * batch, -1, width)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", ranks.size, ranks.name))


def _sum(part: Tensor, ranks: Ranks) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(part.contiguous(), "sum", ranks.name))


class _AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gather(x_BtD, ranks, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad_BTD, ctx.ranks), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BTD: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _scatter(part_BTD, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_BtD, ctx.ranks, 1), None


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gather(part, ranks, part.ndim - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks.size, dim=-1)[ctx.ranks.local_rank], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _sum(part, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.ranks), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None
