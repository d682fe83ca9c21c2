"""How many sequences of each source a step takes: whole numbers whose prefix sums keep within one of the exact shares.

In a step with ``rows`` sequences the exact share of source s is rows * weight_s / unit. It gets the floor, and the
parts that are left over make up a whole number of *seats*, given out one at most to a source. So each batch holds the
floor or the ceiling of every share, nothing of a source without weight, and |count_s - share_s| < 1 after every step,
through all changes of rows and weights. Such a rounding always exists: entries and prefix sums of a source are nested,
and so are the columns, and a matrix with two nested families is totally unimodular (Hoffman and Kruskal, 1956).

It is found step by step: seats go to whoever must have one soonest (earliest deadline first, as for the chairman of
Tijdeman, 1980). Where the shares of the next span leave no way on, seats of the last steps change hands along an
augmenting path of the flow that the rounding is (Ford and Fulkerson), shortest first, so a choice depends on a later
span only in the few steps before it. While shares do not change, the choice repeats: after a *period* the exact shares
have the same fractions, and once the same sources are ahead the rest of the span is the same table again. Only tables
are stored. The last span is laid out as if it went on for ever, so that a longer run begins alike.

Integers only. Knows no positions, ordinals or configs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NEVER = 1 << 62
_TAIL_STEPS = 64
"""Steps before the end of a span that stay open for changes of hands; more where they do not suffice."""


class Rates(NamedTuple):
    """Steps with the same rows and weights."""

    n_steps: int
    rows: int
    weights: tuple[int, ...]
    """They sum to ``unit``."""


@dataclass(frozen=True)
class Segment:
    """Steps that take ``counts`` [cycle, sources], row by row and over again."""

    start_step: int
    n_steps: int
    counts: npt.NDArray[np.int64]


def interleave(spans: Sequence[Rates], unit: int) -> list[Segment]:
    """Counts of every step of ``spans``, without a gap from step 0; the exact shares begin at 0 with the first.

    Consecutive spans that agree are one span, however they are cut.
    """
    assert all(sum(span.weights) == unit for span in spans)
    merged: list[Rates] = []
    for span in spans:
        n_before = merged.pop().n_steps if merged and merged[-1][1:] == span[1:] else 0
        merged.append(span._replace(n_steps=n_before + span.n_steps))
    tail, whole = _TAIL_STEPS, sum(span.n_steps for span in merged)
    while True:
        try:
            return _Walk(unit, tail).over(merged)
        except _Blocked:
            assert tail < whole, "no rounding was found, which the theorem excludes"
            tail *= 4


class _Blocked(Exception):
    """The steps that are still open give no way on."""


class _Step:
    """One open step: who took a seat, and who is ahead of its exact share after it."""

    __slots__ = ("ahead", "fraction", "pace", "taken")

    def __init__(self, pace: "_Pace", taken: list[int], ahead: list[int], fraction: list[int]) -> None:
        self.pace, self.taken, self.ahead, self.fraction = pace, taken, ahead, fraction
        # fraction: of the exact share after the step; where it is 0 the share is whole, and nobody may be ahead


class _Pace:
    """What a step of one span adds to the exact shares."""

    def __init__(self, span: Rates, unit: int) -> None:
        floors = [divmod(span.rows * weight, unit) for weight in span.weights]
        self.floor, self.part = [floor for floor, _ in floors], [part for _, part in floors]
        self.seats = sum(self.part) // unit
        self.period = unit // gcd(unit, *self.part)


class _Walk:
    """Goes over the steps. Fractions of the exact shares are whole numbers of 1 / ``unit``.

    A source is *ahead* where its count is the ceiling of a share that is no whole number, else it is behind.
    """

    def __init__(self, unit: int, tail: int) -> None:
        self.unit, self.tail = unit, tail
        self.segments: list[Segment] = []

    def over(self, spans: Sequence[Rates]) -> list[Segment]:
        n_sources = len(spans[0].weights)
        self.fraction, self.ahead = [0] * n_sources, [0] * n_sources
        self.open: list[_Step] = []
        self.open_from = 0
        start = 0
        for index, span in enumerate(spans):
            self._span(_Pace(span, self.unit), start, start + span.n_steps, last=index == len(spans) - 1)
            start += span.n_steps
        self._close(start)
        return self.segments

    def _span(self, pace: _Pace, start: int, end: int, *, last: bool) -> None:
        at = start
        stop = end if last else end - self.tail
        edges: list[int] = []
        # the last span goes on until it repeats, even beyond its end: what a longer run needs is settled now
        while at < end or last:
            if (at - start) % pace.period == 0:
                begun = next((edge for edge in edges if self._ahead_before(edge) == self.ahead), None)
                if begun is not None and at < stop:
                    self._repeat(pace, begun, at, stop)
                    at = stop
                    edges.clear()
                    if last:
                        return
                    continue
                if begun is not None and last:
                    return
                edges.append(at)
            self._step(pace)
            at += 1

    def _repeat(self, pace: _Pace, begun: int, at: int, stop: int) -> None:
        """Steps [begun, at) repeat as far as ``stop``; what lies before is settled."""
        cycle = self.open[begun - self.open_from : at - self.open_from]
        after = cycle[(stop - begun - 1) % len(cycle)]
        self._close(begun)
        self.segments.append(Segment(begun, stop - begun, _counts(cycle)))
        self.open, self.open_from = [], stop
        self.ahead = list(after.ahead)
        self.fraction = [
            (fraction + (stop - at) * part) % self.unit for fraction, part in zip(self.fraction, pace.part, strict=True)
        ]
        self.ahead_at_open = list(self.ahead)

    def _close(self, end: int) -> None:
        """Write the open steps before ``end`` down, a segment for each span."""
        steps = self.open[: end - self.open_from]
        first = 0
        for index in range(1, len(steps) + 1):
            if index == len(steps) or steps[index].pace is not steps[first].pace:
                self.segments.append(Segment(self.open_from + first, index - first, _counts(steps[first:index])))
                first = index

    def _ahead_before(self, step: int) -> list[int]:
        if step > self.open_from:
            return self.open[step - self.open_from - 1].ahead
        return self.ahead_at_open if step else [0] * len(self.ahead)

    def _step(self, pace: _Pace) -> None:
        unit, ahead = self.unit, self.ahead
        due: list[tuple[int, int]] = []
        taken = [0] * len(ahead)
        over = list(ahead)
        seats = pace.seats
        fraction = self.fraction
        for source, part in enumerate(pace.part):
            if not part:
                continue
            grown = fraction[source] + part
            if grown < unit:
                fraction[source] = grown
                if not ahead[source]:
                    due.append((-((grown - unit) // part), source))
            else:
                grown -= unit
                fraction[source] = grown
                if not ahead[source]:
                    taken[source] = 1
                    seats -= 1
                else:
                    over[source] = 0
                    if grown:
                        due.append((-((grown - unit) // part), source))
        if seats > 0:
            due.sort()
            if seats < len(due) and due[seats - 1][0] == due[seats][0]:
                due = self._by_later_deadlines(pace, due, seats)
            for _, source in due[:seats]:
                taken[source] = 1
                over[source] = 1
        self.open.append(_Step(pace, taken, over, list(fraction)))
        for _ in range(seats - len(due)):
            self._change_hands(1)
        for _ in range(-seats):
            self._change_hands(-1)
        self.ahead = self.open[-1].ahead

    def _by_later_deadlines(self, pace: _Pace, due: list[tuple[int, int]], seats: int) -> list[tuple[int, int]]:
        """``due`` in an order in which the first ``seats`` are never wrong while the shares go on as they do.

        Equal deadlines are told apart by the next ones, for who may take a seat in the very step in which the one
        before it is due (the rule of PF: Baruah, Cohen, Plaxton, Varvel, 1996). What agrees for a period agrees always.
        """
        due, rest = list(due), list(self.fraction)
        low, high, passed = 0, len(due), 0
        while due[seats - 1][0] == due[seats][0] <= pace.period:
            # one more deadline of those that still stand alike at the last seat: often two or three
            steps = due[seats][0]
            low = next(index for index in range(low, high) if due[index][0] == steps)
            high = next((index for index in range(seats, high) if due[index][0] > steps), high)
            later = []
            for _, source in due[low:high]:
                part = pace.part[source]
                rest[source] += (steps - passed) * part - self.unit
                wait = -((rest[source] - self.unit) // part)
                later.append((steps + wait if rest[source] else _NEVER, source))
            due[low:high], passed = sorted(later), steps
        return due

    def _change_hands(self, sign: int) -> None:
        """One seat of the last step more (``sign`` 1: nobody is left to take it) or less (-1: too many must have it).

        Nodes are (step, -1), a step with a seat too many (or too few), and (step, source), a source whose count is one
        too high (low) from that step on. Moves are the residual edges of the flow from steps to sources to the end.
        """
        last = len(self.open) - 1
        came: dict[tuple[int, int], tuple[int, int]] = {(last, -1): (last, -1)}
        queue = deque(came)
        while queue:
            node = queue.popleft()
            if node[1] >= 0 and node[0] == last and self._may(last, node[1], sign):
                return self._apply(node, came, sign)
            for other in self._moves(node, last, sign):
                if other not in came:
                    came[other] = node
                    queue.append(other)
        raise _Blocked

    def _moves(self, node: tuple[int, int], last: int, sign: int) -> list[tuple[int, int]]:
        index, source = node
        step = self.open[index]
        wanted = 0 if sign > 0 else 1
        if source < 0:
            return [(index, s) for s, part in enumerate(step.pace.part) if part and step.taken[s] == wanted]
        moves = []
        if step.pace.part[source] and step.taken[source] != wanted:
            moves.append((index, -1))
        if index and self._may(index - 1, source, -sign):
            moves.append((index - 1, source))
        if index < last and self._may(index, source, sign):
            moves.append((index + 1, source))
        return moves

    def _may(self, index: int, source: int, by: int) -> bool:
        """Whether the count of a source after an open step may be one higher (lower)."""
        step = self.open[index]
        return step.ahead[source] == 1 if by < 0 else step.ahead[source] == 0 and step.fraction[source] > 0

    def _apply(self, node: tuple[int, int], came: dict[tuple[int, int], tuple[int, int]], sign: int) -> None:
        self.open[node[0]].ahead[node[1]] += sign
        while came[node] != node:
            before = came[node]
            if before[0] == node[0]:
                step, source = self.open[node[0]], max(before[1], node[1])
                step.taken[source] = 1 - step.taken[source]
            elif before[0] < node[0]:
                self.open[before[0]].ahead[node[1]] += sign
            else:
                self.open[node[0]].ahead[node[1]] -= sign
            node = before


def _counts(steps: Sequence[_Step]) -> npt.NDArray[np.int64]:
    rows = [[f + t for f, t in zip(step.pace.floor, step.taken, strict=True)] for step in steps]
    return np.array(rows, dtype=np.int64)
