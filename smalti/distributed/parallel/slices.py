"""Tensors that the ranks of the axis ``tensor`` hold in equal slices: gathered, summed, scattered, with gradients.

Promises: one collective in forward and one in backward for each function, of the larger buffer's bytes that
``cost/layout/collectives.py`` counts; nothing waits for the device. Which gradient is right depends on what the
ranks do with the result, so each function says what it takes them to do.

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
    """The ranks that share each matrix, and which of them this one is."""

    name: str
    """Of the process group, as torch's functional collectives and its compiler take it."""
    size: int
    place: int

    @staticmethod
    def of(axis: DeviceMesh) -> "Ranks":
        """Those of a mesh of one dim."""
        return Ranks(axis.get_group().group_name, axis.size(), axis.get_local_rank())


def gathered(x_BtD: Tensor, ranks: Ranks) -> Tensor:
    """[B, t, D] -> [B, T, D]. Each rank makes another part of what follows, so gradients are summed and scattered."""
    out: Tensor = _Gathered.apply(x_BtD, ranks)
    return out


def scattered(part_BTD: Tensor, ranks: Ranks) -> Tensor:
    """[B, T, D], a part of a sum -> [B, t, D], this rank's slice of the sum over the ranks."""
    out: Tensor = _Scattered.apply(part_BTD, ranks)
    return out


def joined(part: Tensor, ranks: Ranks) -> Tensor:
    """[..., d] -> [..., W d]. All ranks make the same of the result, so each keeps its own slice of the gradient."""
    out: Tensor = _Joined.apply(part, ranks)
    return out


def summed(part: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks. Each makes another part of what follows, so gradients are summed as well."""
    out: Tensor = _Summed.apply(part, ranks)
    return out


def shared(x: Tensor, ranks: Ranks) -> Tensor:
    """``x``, which all ranks have and make the same of, where gradients are summed over them later: each gives 1/W."""
    out: Tensor = _Shared.apply(x, ranks) if x.requires_grad else x
    return out


def stacked(part: Tensor, ranks: Ranks) -> Tensor:
    """[...] -> [W, ...], what each rank has; without a gradient."""
    return _gather(part[None], ranks, 0)


def _gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name))
    if x.shape[:dim].numel() == 1:  # of one row the slices lie behind each other already: nothing to move
        return parts.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(parts.chunk(ranks.size), dim=dim)


def _scatter(x_BTD: Tensor, ranks: Ranks) -> Tensor:
    batch, _, width = x_BTD.shape
    slices = x_BTD if batch == 1 else torch.cat(x_BTD.chunk(ranks.size, dim=1))
    rows = slices.reshape(ranks.size * batch, -1, width)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", ranks.size, ranks.name))


def _sum(part: Tensor, ranks: Ranks) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(part.contiguous(), "sum", ranks.name))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gather(x_BtD, ranks, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad_BTD, ctx.ranks), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BTD: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _scatter(part_BTD, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_BtD, ctx.ranks, 1), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gather(part, ranks, part.ndim - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks.size, dim=-1)[ctx.ranks.place], None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _sum(part, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.ranks), None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None
