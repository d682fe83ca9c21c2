"""Rounds a mixture to whole numbers of sequences per step, so that no source drifts from its exact share.

In a step of ``rows`` sequences the exact share of source s is ``rows * weight_s / unit``. Each step takes the floor or
the ceiling of every share, and after every step a source's count differs from the sum of its shares by less than 1.
docs/decisions/0009 proves that this algorithm always finds such a rounding. Uses integers only.
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
"""Steps before the end of a span that may still be reassigned; quadrupled if they do not suffice."""


class SpanWeights(NamedTuple):
    """A number of steps with the same rows and weights."""

    n_steps: int
    rows: int
    weights: tuple[int, ...]
    """They sum to ``unit``."""


@dataclass(frozen=True)
class Cycle:
    """``n_steps`` steps that take the rows of ``counts`` [period, sources] in turn, repeatedly."""

    start_step: int
    n_steps: int
    counts: npt.NDArray[np.int64]


def interleave(spans: Sequence[SpanWeights], unit: int) -> list[Cycle]:
    """Return the counts of every step of ``spans``, which are consecutive from step 0.

    Consecutive spans with equal rows and weights give the same result as one span. The last span is computed as if it
    never ended, so that a longer run begins with the same steps.
    """
    assert all(sum(span.weights) == unit for span in spans)
    merged: list[SpanWeights] = []
    for span in spans:
        n_before = merged.pop().n_steps if merged and merged[-1][1:] == span[1:] else 0
        merged.append(span._replace(n_steps=n_before + span.n_steps))
    tail_steps = _TAIL_STEPS
    total_steps = sum(span.n_steps for span in merged)
    while True:
        try:
            return _Assignment(unit, tail_steps, len(merged[0].weights)).run(merged)
        except _NoAugmentingPath:
            assert tail_steps < total_steps, "no rounding was found, which the theorem excludes"
            tail_steps *= 4


class _NoAugmentingPath(Exception):
    """The steps that may still be reassigned allow no valid rounding of the next step."""


class _Rate:
    """The exact shares of one step of a span: ``floor + fraction / unit`` for each source."""

    def __init__(self, span: SpanWeights, unit: int) -> None:
        shares = [divmod(span.rows * weight, unit) for weight in span.weights]
        self.floor = [floor for floor, _ in shares]
        self.fraction = [fraction for _, fraction in shares]
        self.remainder = sum(self.fraction) // unit
        """Sequences that remain after the floors; each source gets at most one of them."""
        self.period = unit // gcd(unit, *self.fraction)
        """Steps after which the exact shares have the same fractional parts."""


class _Node(NamedTuple):
    """A node of the residual graph of the flow from steps to sources; see ``_Assignment._reassign``."""

    step: int
    """Index of an open step."""
    source: int
    """A source whose count is one too high (low) from that step on; -1: the step has one sequence too many (few)."""


class _Step:
    """A step that may still be reassigned. All lists are [sources]."""

    __slots__ = ("rate", "residue", "rounded_up", "surplus")

    def __init__(self, rate: _Rate, rounded_up: list[int], surplus: list[int], residue: list[int]) -> None:
        self.rate = rate
        self.rounded_up = rounded_up
        """1 if the step takes the ceiling of the source's share, 0 if it takes the floor."""
        self.surplus = surplus
        """Surplus after the step; see ``_Assignment``."""
        self.residue = residue
        """Fractional part of the exact share after the step, in 1 / unit; a source with 0 cannot have a surplus."""


class _Assignment:
    """Assigns the remainder of each step, in order.

    A source has a *surplus* of 1 if its count so far is the ceiling of a share that is not a whole number, else 0.
    """

    def __init__(self, unit: int, tail_steps: int, n_sources: int) -> None:
        self.unit = unit
        self.tail_steps = tail_steps
        self.cycles: list[Cycle] = []
        self.residue = [0] * n_sources
        """[sources] fractional part of the exact share so far, in 1 / unit."""
        self.surplus = [0] * n_sources
        """[sources] surplus after the last step."""
        self.open: list[_Step] = []
        """Steps that are assigned but not emitted as a cycle yet."""
        self.open_start = 0
        """Number of the first open step."""
        self.surplus_at_open = [0] * n_sources
        """[sources] surplus before the first open step."""

    def run(self, spans: Sequence[SpanWeights]) -> list[Cycle]:
        start = 0
        for index, span in enumerate(spans):
            self._add_span(_Rate(span, self.unit), start, start + span.n_steps, last=index == len(spans) - 1)
            start += span.n_steps
        self._emit(start)
        return self.cycles

    def _add_span(self, rate: _Rate, start: int, end: int, *, last: bool) -> None:
        stop = end if last else end - self.tail_steps
        step = start
        period_starts: list[int] = []
        # The last span continues until it repeats, even beyond its end, so that the result does not depend on the end.
        while step < end or last:
            if (step - start) % rate.period == 0:
                equal = next((first for first in period_starts if self._surplus_before(first) == self.surplus), None)
                if equal is not None and step < stop:
                    self._repeat(rate, equal, step, stop)
                    step = stop
                    period_starts.clear()
                    if last:
                        return
                    continue
                if equal is not None and last:
                    return
                period_starts.append(step)
            self._add_step(rate)
            step += 1

    def _repeat(self, rate: _Rate, first: int, step: int, stop: int) -> None:
        """Repeat steps [first, step) until ``stop``; those before can no longer be reassigned."""
        cycle = self.open[first - self.open_start : step - self.open_start]
        last_step = cycle[(stop - first - 1) % len(cycle)]
        self._emit(first)
        self.cycles.append(Cycle(first, stop - first, _counts(cycle)))
        self.open = []
        self.open_start = stop
        self.surplus = list(last_step.surplus)
        self.residue = [
            (residue + (stop - step) * fraction) % self.unit
            for residue, fraction in zip(self.residue, rate.fraction, strict=True)
        ]
        self.surplus_at_open = list(self.surplus)

    def _emit(self, end: int) -> None:
        """Add the open steps before ``end`` to the result, one cycle for each span."""
        steps = self.open[: end - self.open_start]
        first = 0
        for index in range(1, len(steps) + 1):
            if index == len(steps) or steps[index].rate is not steps[first].rate:
                self.cycles.append(Cycle(self.open_start + first, index - first, _counts(steps[first:index])))
                first = index

    def _surplus_before(self, step: int) -> list[int]:
        return self.open[step - self.open_start - 1].surplus if step > self.open_start else self.surplus_at_open

    def _add_step(self, rate: _Rate) -> None:
        """Round one step: its remainder goes to the sources with the earliest deadlines."""
        unit = self.unit
        before = self.surplus
        residue = self.residue
        surplus = list(before)
        rounded_up = [0] * len(before)
        remainder = rate.remainder
        deadlines: list[tuple[int, int]] = []
        for source, fraction in enumerate(rate.fraction):
            if not fraction:
                continue
            grown = residue[source] + fraction
            if grown < unit:
                residue[source] = grown
                if not before[source]:
                    deadlines.append((-((grown - unit) // fraction), source))
            else:
                grown -= unit
                residue[source] = grown
                if not before[source]:
                    rounded_up[source] = 1
                    remainder -= 1
                else:
                    surplus[source] = 0
                    if grown:
                        deadlines.append((-((grown - unit) // fraction), source))
        if remainder > 0:
            deadlines.sort()
            if remainder < len(deadlines) and deadlines[remainder - 1][0] == deadlines[remainder][0]:
                deadlines = self._by_later_deadlines(rate, deadlines, remainder)
            for _, source in deadlines[:remainder]:
                rounded_up[source] = 1
                surplus[source] = 1
        self.open.append(_Step(rate, rounded_up, surplus, list(residue)))
        for _ in range(remainder - len(deadlines)):
            self._reassign(1)
        for _ in range(-remainder):
            self._reassign(-1)
        self.surplus = self.open[-1].surplus

    def _by_later_deadlines(
        self, rate: _Rate, deadlines: list[tuple[int, int]], remainder: int
    ) -> list[tuple[int, int]]:
        """Sort so that rounding up the first ``remainder`` sources is never wrong while the rate stays.

        Ties are broken by the following deadlines, since a source may be rounded up again in the step of its deadline
        (rule PF: Baruah, Cohen, Plaxton, Varvel, 1996). Sources that tie for a whole period tie forever.
        """
        deadlines = list(deadlines)
        residue = list(self.residue)
        low = 0
        high = len(deadlines)
        passed = 0
        while deadlines[remainder - 1][0] == deadlines[remainder][0] <= rate.period:
            # compare the next deadline of the sources that still tie for the last place, often two or three
            steps = deadlines[remainder][0]
            low = next(index for index in range(low, high) if deadlines[index][0] == steps)
            high = next((index for index in range(remainder, high) if deadlines[index][0] > steps), high)
            later = []
            for _, source in deadlines[low:high]:
                fraction = rate.fraction[source]
                residue[source] += (steps - passed) * fraction - self.unit
                wait = -((residue[source] - self.unit) // fraction)
                later.append((steps + wait if residue[source] else _NEVER, source))
            deadlines[low:high] = sorted(later)
            passed = steps
        return deadlines

    def _reassign(self, sign: int) -> None:
        """Let the last step round up one source more (``sign`` 1) or one less (-1), along a shortest augmenting path.

        The path is in the residual graph of the flow from steps to sources. Raises _NoAugmentingPath.
        """
        last = len(self.open) - 1
        root = _Node(last, -1)
        parents = {root: root}
        queue = deque(parents)
        while queue:
            node = queue.popleft()
            if node.source >= 0 and node.step == last and self._can_shift(last, node.source, sign):
                return self._augment(node, parents, sign)
            for neighbor in self._residual_edges(node, last, sign):
                if neighbor not in parents:
                    parents[neighbor] = node
                    queue.append(neighbor)
        raise _NoAugmentingPath

    def _residual_edges(self, node: _Node, last: int, sign: int) -> list[_Node]:
        """Return the neighbours of ``node`` in the residual graph."""
        index, source = node
        step = self.open[index]
        wanted = 0 if sign > 0 else 1
        if source < 0:
            fractions = enumerate(step.rate.fraction)
            return [_Node(index, s) for s, fraction in fractions if fraction and step.rounded_up[s] == wanted]
        edges = []
        if step.rate.fraction[source] and step.rounded_up[source] != wanted:
            edges.append(_Node(index, -1))
        if index and self._can_shift(index - 1, source, -sign):
            edges.append(_Node(index - 1, source))
        if index < last and self._can_shift(index, source, sign):
            edges.append(_Node(index + 1, source))
        return edges

    def _can_shift(self, index: int, source: int, by: int) -> bool:
        """Whether the count of a source after an open step may be one higher (``by`` 1) or lower (-1)."""
        step = self.open[index]
        return step.surplus[source] == 1 if by < 0 else step.surplus[source] == 0 and step.residue[source] > 0

    def _augment(self, node: _Node, parents: dict[_Node, _Node], sign: int) -> None:
        """Apply the changes along the path that ends at ``node``."""
        self.open[node.step].surplus[node.source] += sign
        while parents[node] != node:
            parent = parents[node]
            if parent.step == node.step:
                # same step: change whether this source is rounded up (one of the two nodes is the step itself, -1)
                rounded_up = self.open[node.step].rounded_up
                source = max(parent.source, node.source)
                rounded_up[source] = 1 - rounded_up[source]
            elif parent.step < node.step:
                # to the next step: the change remains in the count after the earlier step
                self.open[parent.step].surplus[node.source] += sign
            else:
                # to the previous step: the opposite change is in the count after it
                self.open[node.step].surplus[node.source] -= sign
            node = parent


def _counts(steps: Sequence[_Step]) -> npt.NDArray[np.int64]:
    """Return the counts [steps, sources]."""
    rows = [[f + up for f, up in zip(step.rate.floor, step.rounded_up, strict=True)] for step in steps]
    return np.array(rows, dtype=np.int64)
