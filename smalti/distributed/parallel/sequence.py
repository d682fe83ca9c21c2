"""Sequence parallelism: each row of tokens is split over the ranks of the axis ``sequence``.

    ulysses   all-to-all: a slice of all heads for all tokens of some heads, and back (distributed/parallel/ulysses.py)
    ring      each rank receives the keys and values of the others, one rank at a time (distributed/parallel/ring.py)

Shapes: S rows, T tokens of a row, t tokens of it on this rank, B rows of a batch, E experts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.parallel import Context
from smalti.cost.layout.rules import require, why_not_sequence
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.ring import Ring
from smalti.distributed.parallel.ulysses import Ulysses
from smalti.model.blocks.attention.scores import HeadPart
from smalti.model.blocks.moe import MoE
from smalti.model.decoder import Decoder


def apply(model: nn.Module, mesh: Mesh, *, context: Context) -> None:
    """Replace what depends on a whole row and is not a sum over tokens. Before ``fsdp.shard``.

    That is attention, positions, the counts of the routers' balance loss, and the length that ``dynamic`` and
    ``longrope`` depend on. Loss, gradients and metrics are those of whole rows, up to rounding. ``fsdp.shard`` shards
    weights over shard x sequence.
    """
    ranks, tensor = mesh.layout.sequence, mesh.layout.tensor
    if ranks == 1:
        return
    assert isinstance(model, Decoder), "sequence parallelism needs a smalti Decoder"
    config, group = model.config, mesh.group("sequence")

    def why_not(size: int) -> str | None:
        return why_not_sequence(config, 2 * size, size, tensor=tensor, context=context)  # rows of any length

    require(mesh.layout, "sequence", why_not, range(1, ranks), "train.parallel.context=ring")
    part = HeadPart(mesh.local_rank("tensor") if tensor > 1 else 0, tensor)
    tokens_of_rank = own_part(mesh, context=context)
    by_length = config.rope_scaling is not None and config.rope_scaling.rope_type in ("dynamic", "longrope")
    model.hooks = replace(
        model.hooks,
        kernels_of=Ulysses(group, part) if context == "ulysses" else Ring(group, part),
        positions_of=lambda time, device: tokens_of_rank(torch.arange(time * tensor * ranks, device=device)[None]),
        lengths_of=_longest(group) if by_length else None,
    )
    for module in model.modules():
        if isinstance(module, MoE):
            module.over_row = _over_row(group)


def own_part(mesh: Mesh, *, context: Context) -> Callable[[Tensor], Tensor]:
    """Return a function [S, T] -> [S, t] that selects this rank's tokens of each row; all where the axis is 1.

    Ulysses: the r-th of n slices. Ring: the r-th of 2 n and the r-th from the end (see distributed/parallel/ring.py).
    """
    ranks = mesh.layout.sequence
    if ranks == 1:
        return lambda rows_ST: rows_ST
    local_rank = mesh.local_rank("sequence")
    parts = ranks if context == "ulysses" else 2 * ranks
    numbers = [local_rank] if context == "ulysses" else [local_rank, 2 * ranks - 1 - local_rank]

    def part(rows_ST: Tensor) -> Tensor:
        tokens = rows_ST.shape[1]
        if tokens % parts:
            nearest = max(parts, round(tokens / parts) * parts)
            raise UserError(
                f"rows of {tokens:,} tokens cannot be shared by {ranks} ranks (context {context})",
                allowed=f"a multiple of {parts} tokens",
                hint=f"data.seq_len={nearest}",
            )
        cut_SPt = rows_ST.unflatten(1, (parts, -1))
        return torch.cat([cut_SPt[:, number] for number in numbers], dim=1)

    return part


def _over_row(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def over_row(sums_BE: Tensor) -> Tensor:
        """Sum counts, which have no gradient, in place over the axis."""
        dist.all_reduce(sums_BE, group=group)
        return sums_BE

    return over_row


def _longest(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def longest(positions_Bt: Tensor) -> Tensor:
        """Return the largest position of the whole rows plus one."""
        length = positions_Bt.max() + 1
        dist.all_reduce(length, dist.ReduceOp.MAX, group=group)
        return length

    return longest
