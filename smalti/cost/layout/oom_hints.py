"""Suggests changes of the config after a rank has run out of memory.

Each change gives a possible layout and lowers the planned memory of a rank, to at most that of the device if it is
known. It may not be enough if the plan was wrong.
"""

import math
from contextlib import suppress
from dataclasses import asdict, replace

from smalti.base.errors import UserError
from smalti.config.run import RunConfig
from smalti.cost.axes import AXES, Layout, layout_of
from smalti.cost.layout.possible import check
from smalti.cost.memory.fit import changed_by
from smalti.cost.memory.per_rank import memory_per_rank

_SMALL_CHUNK_BYTES = 2**26
"""A quarter of this is the smallest suggested size of a tile of logits."""


def oom_hints(
    config: RunConfig, layout: Layout, microbatch_tokens: int, *, device: str, memory_bytes: float = math.inf
) -> list[str]:
    """Return alternative changes, ``A.B=VALUE ...``, those without more devices first. ``device``: ``cpu`` or
    ``cuda``."""

    def needed(change: str, target: Layout) -> int:
        changed = changed_by(config, change)
        return memory_per_rank(changed, layout=target, microbatch_tokens=microbatch_tokens, device=device).total_bytes

    parallel, chunk_bytes = config.train.parallel, config.train.loss.tile_bytes(device)
    candidates = [("train.parallel.activation_checkpointing=full", layout)] * (
        parallel.activation_checkpointing == "none"
    )
    if chunk_bytes > _SMALL_CHUNK_BYTES:
        candidates.append((f"train.loss.chunk_bytes={chunk_bytes // 4}", layout))
    if layout.shard % 2 == 0:
        with suppress(UserError):  # not possible with these expert parallel ranks
            shared = replace(layout, shard=layout.shard // 2, sequence=2 * layout.sequence)
            candidates.append((_named(config, shared), shared))
    if device == "cuda":
        grown = replace(layout, shard=2 * layout.shard)
        candidates.append((f"train.parallel.ranks={grown.world_size} {_named(config, grown)}".strip(), grown))
    current, hints = needed("", layout), []
    for change, target in candidates:
        with suppress(UserError):  # an impossible layout
            changed = changed_by(config, change)
            check(changed, target)
            if target != layout and layout_of(changed) != target:
                continue
            if needed(change, target) < current and needed(change, target) <= memory_bytes:
                hints.append(change)
    return hints


def _named(config: RunConfig, target: Layout) -> str:
    """Return the ``train.parallel.AXIS=SIZE ...`` that changes the config's axes to those of ``target``.

    An ``auto`` shard stays, because it takes the remaining ranks.
    """
    values = {axis: getattr(config.train.parallel, axis) for axis in AXES}
    sizes = asdict(target)
    rest = [axis for axis in AXES if axis != "shard" or values[axis] != "auto"]
    return " ".join(f"train.parallel.{axis}={sizes[axis]}" for axis in rest if values[axis] != sizes[axis])
