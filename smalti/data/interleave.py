"""Which source each position reads from, such that no prefix is ever off by one whole sequence from its exact share.

The exact share of source s before position p is T_s(p) = sum over stages of (positions in the stage) * weight / unit.
A choice for every position with |count_s(p) - T_s(p)| < 1 for all s and p always exists, with weights that change from
position to position too (Tijdeman, "The chairman assignment problem", 1980; Meijer 1973). It is found here as a
schedule of unit jobs: the k-th sequence of s may not come before T_s > k - 1 and not after T_s = k, and taking the
released job with the earliest deadline is optimal for such jobs. Deadlines look into the stages to come.

Inside a stage the choice repeats: after ``unit / gcd(weights)`` positions the exact shares have the same fractions, so
once the errors return the rest of the stage is the same table again. Only tables are stored, never the whole order.

Promises: error < 1 at every prefix, across stages. Integers only. Does not promise that a source never appears in a
stage where it has no weight: a fraction earned before may be paid there, by one sequence at most.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

_NEVER = 1 << 62


@dataclass(frozen=True)
class Segment:
    """A span of positions whose sources are ``choice`` repeated (cut off at the end of the span)."""

    start: int
    length: int
    choice: npt.NDArray[np.int16]


def interleave(starts: Sequence[int], weights: Sequence[Sequence[int]], unit: int, total: int) -> list[Segment]:
    """The choice for positions 0 to ``total``.

    ``starts`` [stages] are the first positions of the stages (the first 0, rising); ``weights`` [stages][sources] sum
    to ``unit`` in each stage. The last stage is laid out as if it went on for ever, so that a longer run begins alike.
    """
    lanes = _Lanes(starts, weights, unit)
    segments: list[Segment] = []
    for stage, start in enumerate(starts):
        last = stage == len(starts) - 1
        length = (total if last else starts[stage + 1]) - start
        period = unit // gcd(*weights[stage])
        # a deadline lies at most one period after its release: only the last period of a stage can see the next stage
        tail = 0 if last else min(length, period)
        segments += _head(lanes, stage, length - tail, period)
        if tail:
            tail_start = start + length - tail
            segments.append(Segment(tail_start, tail, _table(lanes.run(stage, tail_start, tail, look_ahead=True))))
    return segments


def _head(lanes: "_Lanes", stage: int, length: int, period: int) -> list[Segment]:
    """Lay out the first ``length`` positions of a stage, by simulating periods until the errors return."""
    start = lanes.starts[stage]
    seen: dict[tuple[int, ...], int] = {}
    tables: list[npt.NDArray[np.int16]] = []
    while len(tables) * period < length:
        state = lanes.errors(stage, start + len(tables) * period)
        if state in seen:
            return _repeat(lanes, tables, seen[state], start, length, period)
        seen[state] = len(tables)
        begin = start + len(tables) * period
        tables.append(_table(lanes.run(stage, begin, min(period, start + length - begin), look_ahead=False)))
    return [Segment(start, length, np.concatenate(tables))] if tables else []


def _repeat(
    lanes: "_Lanes", tables: list[npt.NDArray[np.int16]], first: int, start: int, length: int, period: int
) -> list[Segment]:
    """Tables ``first`` and after repeat to the end of the head; brings the counts of ``lanes`` there."""
    cycle = np.concatenate(tables[first:])
    rest = length - len(tables) * period
    turns, cut = divmod(rest, cycle.size)
    n_sources = len(lanes.counts)
    whole, part = np.bincount(cycle, minlength=n_sources), np.bincount(cycle[:cut], minlength=n_sources)
    for source in range(n_sources):
        lanes.counts[source] += turns * int(whole[source]) + int(part[source])
    segments = [Segment(start, first * period, np.concatenate(tables[:first]))] if first else []
    return [*segments, Segment(start + first * period, length - first * period, cycle)]


def _table(choice: list[int]) -> npt.NDArray[np.int16]:
    return np.asarray(choice, dtype=np.int16)


class _Lanes:
    """Counts of every source while positions are handed out; all shares in units of 1 / ``unit``, as whole numbers."""

    def __init__(self, starts: Sequence[int], weights: Sequence[Sequence[int]], unit: int) -> None:
        self.starts, self.weights, self.unit = starts, weights, unit
        self.counts = [0] * len(weights[0])
        self.shares = [[0] * len(weights[0])]
        for stage in range(1, len(starts)):
            length = starts[stage] - starts[stage - 1]
            before = self.shares[-1]
            self.shares.append([b + length * w for b, w in zip(before, weights[stage - 1], strict=True)])

    def errors(self, stage: int, position: int) -> tuple[int, ...]:
        """Exact share minus count of each source before ``position``, in units of 1 / ``unit``."""
        inside = position - self.starts[stage]
        return tuple(
            share + inside * weight - self.unit * count
            for share, weight, count in zip(self.shares[stage], self.weights[stage], self.counts, strict=True)
        )

    def run(self, stage: int, position: int, n: int, *, look_ahead: bool) -> list[int]:
        """Choose the sources of ``n`` positions inside one stage, and count them."""
        start, weights, shares, unit = self.starts[stage], self.weights[stage], self.shares[stage], self.unit
        end = self.starts[stage + 1] if look_ahead and stage + 1 < len(self.starts) else _NEVER
        waiting: list[tuple[int, int]] = []
        ready: list[tuple[int, int]] = []
        for source, share in enumerate(shares):
            lead = self.counts[source] * unit - share
            if weights[source]:
                heapq.heappush(waiting, (start + lead // weights[source], source))
            elif lead < 0:
                heapq.heappush(ready, (self._later(source, stage), source))
        choice: list[int] = []
        for now in range(position, position + n):
            while waiting and waiting[0][0] <= now:
                source = heapq.heappop(waiting)[1]
                due = start - (shares[source] - (self.counts[source] + 1) * unit) // weights[source]
                heapq.heappush(ready, (due if due <= end else self._later(source, stage), source))
            assert ready, "no source may be read here, which the theorem excludes"
            due, source = heapq.heappop(ready)
            assert due > now, "a share is a whole sequence behind, which the theorem excludes"
            choice.append(source)
            self.counts[source] += 1
            if weights[source]:
                lead = self.counts[source] * unit - shares[source]
                heapq.heappush(waiting, (start + lead // weights[source], source))
        return choice

    def _later(self, source: int, stage: int) -> int:
        """The deadline of a source's next sequence when it falls into a stage after ``stage``."""
        owed = (self.counts[source] + 1) * self.unit
        for later in range(stage + 1, len(self.starts)):
            weight = self.weights[later][source]
            if not weight:
                continue
            due = self.starts[later] - (self.shares[later][source] - owed) // weight
            if later + 1 == len(self.starts) or due <= self.starts[later + 1]:
                return due
        return _NEVER
