"""What to change where a rank of a run has run out of memory, whatever the plan had said of it.

Promises: each change oom_hints what the planner says of a rank with the layout that ran, is enough for the device where
its memory is known, and makes a layout that can be laid. Not that it is enough where the plan was wrong.
"""

import math
from contextlib import suppress
from dataclasses import asdict, replace

from smalti.base.errors import UserError
from smalti.config.run import RunConfig
from smalti.cost.axes import AXES, Layout, layout_of
from smalti.cost.layout.possible import check
from smalti.cost.memory.fit import changed_by
from smalti.cost.memory.rank import memory_per_rank

_SMALL_CHUNK_BYTES = 2**26
"""Tiles of logits are not cut below a quarter of this."""


def oom_hints(
    config: RunConfig, layout: Layout, microbatch_tokens: int, *, device: str, memory_bytes: float = math.inf
) -> list[str]:
    """``A.B=VALUE ...``, each by itself; what costs no devices comes first. ``device``: ``cpu`` or ``cuda``."""

    def needed(change: str, on: Layout) -> int:
        changed = changed_by(config, change)
        return memory_per_rank(changed, layout=on, microbatch_tokens=microbatch_tokens, device=device).total_bytes

    parallel, chunk_bytes = config.train.parallel, config.train.loss.tile_bytes(device)
    tried = [("train.parallel.activation_checkpointing=full", layout)] * (parallel.activation_checkpointing == "none")
    if chunk_bytes > _SMALL_CHUNK_BYTES:
        tried.append((f"train.loss.chunk_bytes={chunk_bytes // 4}", layout))
    if layout.shard % 2 == 0:
        with suppress(UserError):  # expert parallel ranks that do not go with it
            shared = replace(layout, shard=layout.shard // 2, sequence=2 * layout.sequence)
            tried.append((_named(config, shared), shared))
    if device == "cuda":
        grown = replace(layout, shard=2 * layout.shard)
        tried.append((f"train.parallel.ranks={grown.world_size} {_named(config, grown)}".strip(), grown))
    now, found = needed("", layout), []
    for change, on in tried:
        with suppress(UserError):  # a layout that cannot be
            changed = changed_by(config, change)
            check(changed, on)
            if on != layout and layout_of(changed) != on:
                continue
            if needed(change, on) < now and needed(change, on) <= memory_bytes:
                found.append(change)
    return found


def _named(config: RunConfig, on: Layout) -> str:
    """``train.parallel.AXIS=SIZE ...`` that makes the config's axes those of ``on``, whatever is ``auto`` there; shard
    may stay ``auto``: it is all that the others leave."""
    given, sizes = {axis: getattr(config.train.parallel, axis) for axis in AXES}, asdict(on)
    rest = [axis for axis in AXES if axis != "shard" or given[axis] != "auto"]
    return " ".join(f"train.parallel.{axis}={sizes[axis]}" for axis in rest if given[axis] != sizes[axis])
