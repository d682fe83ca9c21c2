"""Ulysses: all-to-all from a slice of all heads to all tokens of some heads, attention, and all-to-all back.

Jacobs et al. 2023, arXiv:2309.14509; docs/concepts/distributed/sequence-parallel.md.

Shapes: B rows, T tokens of a row, t tokens of it on this rank, n ranks, H query heads and K key heads of this rank's
slice, h and k those that it attends with, d width of a head.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.choice import kernels_of
from smalti.model.blocks.attention.scores import Attend, HeadPart


class Ulysses:
    """A ``kernels_of`` for a decoder whose rows are split over the ranks of ``group``; ``part``: the heads of them all.

    Between the exchanges, the kernel that one process would choose for whole rows computes this rank's heads, so packed
    documents, windows, ALiBi and soft caps need no code here.
    """

    def __init__(self, group: dist.ProcessGroup, part: HeadPart) -> None:
        self.group, self.ranks = group, group.size()
        self.part = HeadPart(part.number * self.ranks + group.rank(), part.parts * self.ranks)
        self.kernels_of = kernels_of
        """Builds the kernels for whole rows; replaceable."""

    def __call__(
        self, config: ModelConfig, like_BtD: Tensor, documents_BT: Tensor | None, n_documents: int | None = None
    ) -> dict[int | None, Attend]:
        """Return window -> attention kernel, for the layers with that window in this batch."""
        batch, time, width = like_BtD.shape
        like_BTD = like_BtD[:, :1].expand(batch, time * self.ranks, width)
        kernels = self.kernels_of(config, like_BTD, documents_BT, n_documents, part=self.part)
        return {window: _Exchanged(self.group, attend) for window, attend in kernels.items()}


class _Exchanged:
    """An ``Attend`` over slices of rows that calls one over whole rows.

    One all-to-all sends query, key and value together, one more sends the output back; their backward passes are two
    more of the same sizes. Only what the kernel saves is kept for backward.
    """

    def __init__(self, group: dist.ProcessGroup, attend: Attend) -> None:
        self.group, self.attend = group, attend

    @torch._disable_dynamo  # the collectives separate what is compiled
    def __call__(self, query_BHtd: Tensor, key_BKtd: Tensor, value_BKtd: Tensor) -> Tensor:
        """Return the attention output [B, t, H, d]."""
        query_BhTd, key_BkTd, value_BkTd = _ToHeads.apply(query_BHtd, key_BKtd, value_BKtd, self.group)
        mixed_BtHd: Tensor = _ToTokens.apply(self.attend(query_BhTd, key_BkTd, value_BkTd), self.group)
        return mixed_BtHd


class _ToHeads(torch.autograd.Function):
    """Query, key and value of a slice with all heads -> of whole rows with some heads, [B, h or k, T, d].

    If key heads are fewer than ranks, each goes to several ranks, and their gradients are added in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, query_BHtd: Tensor, key_BKtd: Tensor, value_BKtd: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        ranks, ctx.group = group.size(), group
        ctx.repeats = max(1, ranks // key_BKtd.shape[1])
        parts = (query_BHtd, *(_repeated(part, ctx.repeats) for part in (key_BKtd, value_BKtd)))
        ctx.heads = [part.shape[1] // ranks for part in parts]
        sent_nBtjd = torch.cat([_by_heads(part.transpose(1, 2), ranks) for part in parts], dim=3)
        whole_BTjd = _concatenated(_swap(sent_nBtjd, group))
        return tuple(part.transpose(1, 2) for part in whole_BTjd.split(ctx.heads, dim=2))

    @staticmethod
    def backward(ctx: Any, *grads_BjTd: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.group.size()
        grad_BTjd = torch.cat([grad.transpose(1, 2) for grad in grads_BjTd], dim=2)
        received_nBtjd = _swap(_by_tokens(grad_BTjd, ranks), ctx.group)
        query, key, value = (
            part.movedim(0, 2).flatten(2, 3).transpose(1, 2) for part in received_nBtjd.split(ctx.heads, dim=3)
        )
        return query, _sum_of_copies(key, ctx.repeats), _sum_of_copies(value, ctx.repeats), None


class _ToTokens(torch.autograd.Function):
    """Attention output for whole rows of some heads, [B, T, h, d] -> for a slice with all heads, [B, t, H, d]."""

    @staticmethod
    def forward(ctx: Any, mixed_BThd: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received_nBthd = _swap(_by_tokens(mixed_BThd, group.size()), group)
        return received_nBthd.movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad_BtHd: Tensor) -> tuple[Tensor, None]:
        return _concatenated(_swap(_by_heads(grad_BtHd, ctx.group.size()), ctx.group)), None


def _by_heads(x_BtHd: Tensor, ranks: int) -> Tensor:
    """Return [n, B, t, h, d]: heads by the rank that attends with them."""
    return x_BtHd.unflatten(2, (ranks, -1)).movedim(2, 0)


def _by_tokens(x_BThd: Tensor, ranks: int) -> Tensor:
    """Return [n, B, t, h, d]: tokens by the rank that holds them."""
    return x_BThd.unflatten(1, (ranks, -1)).movedim(1, 0)


def _concatenated(x_nBthd: Tensor) -> Tensor:
    """Return [B, T, h, d]: the tokens of all ranks in their order."""
    return x_nBthd.movedim(0, 1).flatten(1, 2)


def _swap(sent_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry r of dim 0 to rank r; return the received entries in the order of the senders."""
    sent_n = sent_n.contiguous()
    received_n = torch.empty_like(sent_n)
    dist.all_to_all_single(received_n, sent_n, group=group)
    return received_n


def _repeated(x_BKtd: Tensor, repeats: int) -> Tensor:
    return x_BKtd.repeat_interleave(repeats, dim=1) if repeats > 1 else x_BKtd


def _sum_of_copies(grad_BKtd: Tensor, repeats: int) -> Tensor:
    """Sum the gradients of the copies of each key head, in float32."""
    if repeats == 1:
        return grad_BKtd
    sums = torch.promote_types(grad_BKtd.dtype, torch.float32)
    return grad_BKtd.unflatten(1, (-1, repeats)).sum(dim=2, dtype=sums).to(grad_BKtd.dtype)
