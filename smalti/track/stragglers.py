"""Finds ranks whose own work in a step takes longer than that of the others, from two readings of the slots.

Own work contains no waiting for other ranks (``progress.Progress.work_ns``): in a step with collectives all ranks take
the same time, and only their work differs. A rank is slow if its work is both far above the median, by the median
absolute deviation of all ranks, and large enough to matter.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.track.progress import WORK, Phase, Progress

LEAST_RANKS = 3
"""Of two ranks none is the odd one."""
LEAST_FACTOR = 1.25
"""A rank with less work than so many times the median is not slow."""
_SCORE = 6.0
_SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation."""
_LEAST_SIGMA = 0.03
"""Least standard deviation, as a share of the median: that of few ranks may be near 0 by chance."""

_NOTES = 5

Work = Mapping[Phase, float]
"""Phase of a step -> seconds of own work per step."""


@dataclass(frozen=True)
class Straggler:
    """A node with slow ranks."""

    node: str
    rank: int
    """Its slowest rank."""
    phase: Phase
    """Where most of that rank's additional work is."""
    factor: float
    """Work of that rank / the median over ranks."""
    node_factor: float
    """Median over the node's ranks of the same."""
    ranks: tuple[int, ...]
    """All slow ranks of the node."""
    work_s: float
    """Work of the slowest rank in a step."""
    median_s: float


def work_between(before: Iterable[Progress], after: Iterable[Progress]) -> dict[int, Work]:
    """Return the own work of each rank in a step between two readings, by rank.

    Ranks without a step in between are left out: they have just started, or the file that was read is old.
    """
    first = {slot.rank: slot for slot in before}
    work: dict[int, Work] = {}
    for slot in after:
        start = first.get(slot.rank)
        if start is not None and start.pid == slot.pid and (steps := slot.step - start.step) > 0:
            work[slot.rank] = {phase: (slot.work_s(phase) - start.work_s(phase)) / steps for phase in WORK}
    return work


def slow_ranks(work: Mapping[int, Work], least_factor: float = LEAST_FACTOR) -> dict[int, float]:
    """Return the ranks that are slow, each with its work / the median. All must have the same work to do."""
    totals_s = {rank: sum(of_rank.values()) for rank, of_rank in work.items()}
    if len(totals_s) < LEAST_RANKS or (median_s := statistics.median(totals_s.values())) <= 0:
        return {}
    deviation_s = statistics.median(abs(total_s - median_s) for total_s in totals_s.values())
    sigma_s = max(_SIGMA_OF_MAD * deviation_s, _LEAST_SIGMA * median_s)
    return {
        rank: total_s / median_s
        for rank, total_s in totals_s.items()
        if total_s >= median_s + _SCORE * sigma_s and total_s >= least_factor * median_s
    }


def by_node(slow: Mapping[int, float], work: Mapping[int, Work], nodes: Sequence[str]) -> list[Straggler]:
    """Return the nodes of slow ranks, the slowest first. work: of ranks with the same work. nodes: of all ranks."""
    if not slow:
        return []
    median_s = statistics.median(sum(of_rank.values()) for of_rank in work.values())
    stragglers = []
    for node in {nodes[rank] for rank in slow}:
        ranks = sorted(rank for rank in slow if nodes[rank] == node)
        worst = max(ranks, key=lambda rank: slow[rank])
        factors = [sum(of_rank.values()) / median_s for rank, of_rank in work.items() if nodes[rank] == node]
        stragglers.append(
            Straggler(
                node=node,
                rank=worst,
                phase=_phase(worst, work),
                factor=slow[worst],
                node_factor=statistics.median(factors),
                ranks=tuple(ranks),
                work_s=sum(work[worst].values()),
                median_s=median_s,
            )
        )
    return sorted(stragglers, key=lambda straggler: (-straggler.factor, straggler.rank))


def words(event: Mapping[str, Any]) -> str:
    """Return an event ``straggler`` in words."""
    others = [rank for rank in event.get("ranks", ()) if rank != event["rank"]]
    beside = f" (also {', '.join(map(str, others))})" if others else ""
    return (
        f"rank {event['rank']}{beside} of {event['node']} is slow: its own work in a step took "
        f"{event['factor']:.2f} times as long as that of the median rank, by most in {event['phase']}, at step "
        f"{event['step']:,}"
    )


def notes(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the last stragglers of a run in words."""
    return [words(event) for event in events if event.get("event") == "straggler"][-_NOTES:]


def _phase(rank: int, work: Mapping[int, Work]) -> Phase:
    """Return the phase in which a rank's work exceeds the median by most."""
    return max(WORK, key=lambda phase: work[rank][phase] - statistics.median(each[phase] for each in work.values()))
