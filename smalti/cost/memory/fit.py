"""Fits a run into the memory of a device: the largest microbatch, and the cheapest changes that make it fit.

Everything is computed by ``memory_per_rank``. Changes without additional FLOPs come first, then recomputation, then
more devices; otherwise speed is not considered.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.memory.per_rank import memory_per_rank

MAX_RANKS = 1 << 20
"""Largest number of ranks that is tried."""

_BESIDE_TENSORS_BYTES, _HEAP_FRAC = 0.4e9, 1.5
"""A rank's process on a CPU: interpreter and torch, and what the C library's heap takes for a byte of live tensors. The
second was 1.1 to 1.55 over the six recipes of bench/plan_memory.py, more the larger the model."""


@dataclass(frozen=True)
class MemoryFix:
    """A change of the recipe with which it fits."""

    change: str
    """The override of the config, such as ``train.microbatch_tokens=4096``."""
    costs: str
    """The cost of the change."""
    total_bytes: int
    """Bytes that a rank then needs."""


def tensor_bytes_on_cpu(memory_bytes: float, ranks: int) -> float:
    """Bytes for the tensors of each of ``ranks`` processes that share the main memory of a machine."""
    return max(1.0, (memory_bytes / ranks - _BESIDE_TENSORS_BYTES) / _HEAP_FRAC)


def largest_microbatch(
    config: RunConfig, memory_bytes: float, layout: Layout | None = None, *, device: str | None = None
) -> int | None:
    """The most tokens in one forward pass on one rank, in whole sequences of the longest, that fit into
    ``memory_bytes``; at most the rank's share of the largest batch. None where not even one sequence fits."""
    if not 0 < memory_bytes < math.inf:
        raise UserError(
            f"a device of {memory_bytes} bytes is not valid", allowed="a number above 0", hint="--gpu h100-sxm"
        )
    seq_len = max(config.data.seq_lens)
    ranks = (layout or layout_of(config)).data_ranks
    max_rows = max(
        1, max(-(-batch // length // ranks) * length for batch, length in config.batches_and_lengths) // seq_len
    )

    def fits(rows: int) -> bool:
        memory = memory_per_rank(config, layout=layout, microbatch_tokens=rows * seq_len, device=device)
        return memory.total_bytes <= memory_bytes

    if not fits(1):
        return None
    low, high = 1, max_rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * seq_len


def memory_fixes(
    config: RunConfig, memory_bytes: float, layout: Layout | None = None, *, device: str | None = None
) -> list[MemoryFix]:
    """Return single changes with which the run fits ``memory_bytes``, the cheapest first.

    Empty if it fits without one, or if none is enough. ``layout``: by default the config's.
    """
    layout = layout or layout_of(config)

    def needed(changed: RunConfig, on: Layout) -> int:
        return memory_per_rank(changed, layout=on, device=device).total_bytes

    if needed(config, layout) <= memory_bytes:
        return []
    fixes = []
    recompute = "train.parallel.activation_checkpointing=full"
    can_recompute = config.train.parallel.activation_checkpointing == "none"
    for change in ("", recompute) if can_recompute else ("",):
        changed = changed_by(config, change)
        if change and needed(changed, layout) <= memory_bytes:
            fixes.append((change, "up to a third more FLOPs: each block's forward pass runs twice", layout))
            break
        largest = largest_microbatch(changed, memory_bytes, layout, device=device)
        if largest is not None:
            costs = "smaller matmuls" if not change else "smaller matmuls, and up to a third more FLOPs"
            fixes.append((f"{change} train.microbatch_tokens={largest}".strip(), costs, layout))
    times = 2
    while device == "cuda" and (ranks := layout.world_size * times) <= MAX_RANKS and _has_share(config, ranks):
        change = f"train.parallel.ranks={ranks}"  # ranks on a CPU share its memory
        with suppress(UserError):  # the axes do not multiply to these ranks
            changed = changed_by(config, change)
            grown = _grown(changed, layout, times)
            if needed(changed, grown) <= memory_bytes:
                fixes.append((change, f"{times} times the devices", grown))
                break
        times *= 2
    return [MemoryFix(change, costs, needed(changed_by(config, change), on)) for change, costs, on in fixes]


def _grown(changed: RunConfig, layout: Layout, times: int) -> Layout:
    """Return ``layout`` on ``times`` as many ranks, which share the weights if shard is ``auto``."""
    is_open = changed.train.parallel.shard == "auto"
    return replace(layout, shard=layout.shard * times) if is_open else layout_of(changed)


def _has_share(config: RunConfig, ranks: int) -> bool:
    """Return True if each rank has a sequence of every batch."""
    return all(batch // seq_len >= ranks for batch, seq_len in config.batches_and_lengths)


def changed_by(config: RunConfig, change: str) -> RunConfig:
    """Return the config with ``A.B=VALUE ...``."""
    values: dict[str, Any] = config.model_dump(mode="json")
    return from_dict(RunConfig, values, overrides=change.split()).config
