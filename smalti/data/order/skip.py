"""Skips the sequences at spans of positions (``data.skip``); the later sequences of each source move up.

Steps, batches and the mixture do not change. Without skips, slot n of a source reads its *ordinal* n; a skipped span of
positions removes an interval of ordinals from each source. Spans apply in the order listed, each to the order that
results from those before it; at a fork, the skips of the steps before the fork come first.
"""

from bisect import insort
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.data.order.lookup import Lookup
from smalti.data.order.spans import Timeline
from smalti.data.order.tables import Int64s

Interval = tuple[int, int]


class Gaps:
    """The skipped ordinals of one source in one segment; converts between slots and ordinals."""

    def __init__(self, gaps: Sequence[Interval] = ()) -> None:
        """``gaps``: intervals of skipped ordinals, as ``passed`` returns them."""
        self._gaps = list(gaps)
        self._index()

    def take_out(self, first_slot: int, last_slot: int) -> None:
        """Skip the ordinals that the slots [first_slot, last_slot) currently read."""
        if first_slot >= last_slot:
            return
        first, last = self.ordinals(np.array([first_slot, last_slot - 1])).tolist()
        insort(self._gaps, (first, last + 1))
        merged: list[Interval] = []
        for begin, end in self._gaps:
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self._gaps = merged
        self._index()

    def passed(self, n_slots: int) -> list[Interval]:
        """Return the intervals of ordinals that the first ``n_slots`` slots skip, which determine their ordinals."""
        return self._gaps[: int(np.searchsorted(self._slots, n_slots))]

    def ordinals(self, slots: Int64s) -> Int64s:
        """Return the ordinal that each slot [n] reads, int64 [n]."""
        if not self._gaps:
            return slots
        return slots + self._before[np.searchsorted(self._slots, slots, side="right")]

    def slots(self, ordinals: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the slot that reads each ordinal [n], and whether any does."""
        if not self._gaps:
            return ordinals, np.ones(ordinals.shape, dtype=bool)
        index = np.searchsorted(self._begins, ordinals, side="right")
        is_read = ordinals >= np.concatenate([[0], self._ends])[index]
        return ordinals - self._before[index], is_read

    def _index(self) -> None:
        self._begins = np.array([begin for begin, _ in self._gaps], dtype=np.int64)
        self._ends = np.array([end for _, end in self._gaps], dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._begins)]).astype(np.int64)
        self._slots = self._begins - self._before[:-1]


def build_gaps(
    skip: Sequence[Interval], timeline: Timeline, lookup: Lookup, past: Mapping[tuple[int, int], Gaps], fork: int
) -> dict[tuple[int, int], Gaps]:
    """Return (segment, source) -> skipped ordinals. ``past``: those of the steps before ``fork``, which do not change.

    Raises UserError for a span of positions outside the run.
    """
    fork_position = timeline.first_position(fork)
    for index, (begin, end) in enumerate(skip):
        if begin >= fork_position and not 0 <= begin < end <= timeline.total_positions:
            raise UserError(
                f"data.skip[{index}] = [{begin:,}, {end:,}] is outside the run or empty",
                allowed=f"a begin below its end, both within the run's {timeline.total_positions:,} positions",
            )
    gaps = dict(past)
    ends = [*(segment.first_position for segment in timeline.segments[1:]), timeline.total_positions]
    for begin, end in skip:
        for number, (segment, segment_end) in enumerate(zip(timeline.segments, ends, strict=True)):
            first = max(begin, segment.first_position)
            last = min(end, segment_end)
            if first >= last or last <= fork_position:
                continue
            low = _slots_before(timeline, lookup, first, number)
            high = _slots_before(timeline, lookup, last, number)
            if first < fork_position:  # ``past`` has the span for each source in which it began before the fork
                high = np.where(low < _slots_before(timeline, lookup, fork_position, number), low, high)
            for source in np.flatnonzero(low < high).tolist():
                gaps.setdefault((number, source), Gaps()).take_out(int(low[source]), int(high[source]))
    return gaps


def _slots_before(timeline: Timeline, lookup: Lookup, position: int, segment: int) -> Int64s:
    """Return the slots [sources] of a segment before ``position``, which need not be the first of a step."""
    start = timeline.segments[segment]
    n_sources = len(timeline.spans[0].weights)
    if position <= start.first_position:
        return np.zeros(n_sources, dtype=np.int64)
    step = int(timeline.step_of([position - 1])[0])
    total = np.zeros(n_sources, dtype=np.int64) if step == start.start_step else lookup.counts(step)
    inside = position - timeline.first_position(step)
    return np.asarray(total + np.bincount(lookup.sources_of(step)[:inside], minlength=n_sources))
