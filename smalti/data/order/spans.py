"""Spans and segments of a run: the batch, seq_len and positions of each step.

A *span* is a range of steps with one global batch, one seq_len and one set of weights. A *segment* is a range of spans
with one seq_len; at its start the tokens are cut into sequences again.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.data.order.tables import Int64s

MAX_POSITIONS = 1 << 46


@dataclass(frozen=True)
class Span:
    """Steps with one global batch, one seq_len and one set of weights; a span ends where the next begins."""

    start_step: int
    rows: int
    """Sequences in a global batch."""
    seq_len: int
    weights: tuple[int, ...]
    """Whole-number share of each source of the schedule, in its order; they sum to the schedule's unit."""
    stage: int
    """Index in ``data.stages``."""

    @property
    def digest(self) -> str:
        """Digest of the choices of the span, independent of the unit and of the index of its stage."""
        common = gcd(*self.weights)
        return digest_json([self.start_step, self.rows, self.seq_len, [weight // common for weight in self.weights]])

    def record(self, sources: Sequence[str]) -> list[Any]:
        """Return the choices of the span as JSON, independent of the unit and of sources without weight."""
        common = gcd(*self.weights)
        weights = {name: weight // common for name, weight in zip(sources, self.weights, strict=True) if weight}
        return [self.start_step, self.rows, self.seq_len, weights]

    def in_units(self, unit: int) -> "Span":
        """Return the span with weights that sum to ``unit``."""
        factor = unit // sum(self.weights)
        return replace(self, weights=tuple(weight * factor for weight in self.weights))

    def for_sources(self, before: Sequence[str], after: Sequence[str]) -> "Span":
        """Return the span with its weights in the order of ``after`` instead of ``before``; a new source has 0."""
        weights: Mapping[str, int] = dict(zip(before, self.weights, strict=True))
        return replace(self, weights=tuple(weights.get(name, 0) for name in after))


@dataclass(frozen=True)
class Segment:
    """Steps with one seq_len; the order of every source restarts with each segment."""

    start_step: int
    first_position: int
    seq_len: int


class Timeline:
    """Converts between steps and positions of a run."""

    def __init__(self, spans: Sequence[Span], total_steps: int) -> None:
        """``spans``: consecutive from step 0."""
        self.spans = tuple(spans)
        self.total_steps = total_steps
        self._starts = [span.start_step for span in self.spans]
        self._positions = [0]
        """[spans + 1] position of the first sequence of each span, and the end of the run."""
        for span, start, end in zip(self.spans, self._starts, [*self._starts[1:], total_steps], strict=True):
            assert start < end
            self._positions.append(self._positions[-1] + (end - start) * span.rows)
        self.total_positions = self._positions[-1]
        if not 1 <= self.total_positions <= MAX_POSITIONS:
            raise UserError(f"a run cannot have {self.total_positions:,} sequences", allowed=f"1 to {MAX_POSITIONS:,}")
        self.segments = tuple(
            Segment(span.start_step, position, span.seq_len)
            for before, span, position in zip((None, *self.spans), self.spans, self._positions, strict=False)
            if before is None or before.seq_len != span.seq_len
        )
        self._segment_starts = [segment.start_step for segment in self.segments]

    def span(self, step: int) -> Span:
        """Return the span of ``step``."""
        self.check_step(step, self.total_steps - 1)
        return self.spans[bisect_right(self._starts, step) - 1]

    def end_step(self, span: int) -> int:
        """Return the step after the last of a span, given by index."""
        return self._starts[span + 1] if span + 1 < len(self._starts) else self.total_steps

    def segment(self, step: int) -> int:
        """Return the index of the segment of ``step``."""
        self.check_step(step, self.total_steps - 1)
        return bisect_right(self._segment_starts, step) - 1

    def segment_end(self, segment: int) -> int:
        """Return the step after the last of a segment."""
        return self.segments[segment + 1].start_step if segment + 1 < len(self.segments) else self.total_steps

    def clamp(self, step: int, segment: int | None) -> tuple[int, int]:
        """Return a segment (None: that of ``step - 1``), and ``step`` clamped to its steps or its end."""
        self.check_step(step, self.total_steps)
        if segment is None:
            return bisect_right(self._segment_starts, max(step - 1, 0)) - 1, step
        return segment, min(max(step, self.segments[segment].start_step), self.segment_end(segment))

    def first_position(self, step: int) -> int:
        """Return the position of the first sequence of ``step``; for ``total_steps``, the end of the run."""
        self.check_step(step, self.total_steps)
        index = bisect_right(self._starts, step) - 1
        return self._positions[index] + (step - self._starts[index]) * self.spans[index].rows

    def step_of(self, positions: npt.ArrayLike) -> Int64s:
        """Return the step of each position [n]."""
        at = self.check_positions(positions)
        index = np.searchsorted(np.array(self._positions[:-1]), at, side="right") - 1
        rows = np.array([span.rows for span in self.spans])
        inside: Int64s = at - np.array(self._positions)[index]
        return np.asarray(np.array(self._starts)[index] + inside // rows[index], dtype=np.int64)

    def check_step(self, step: int, last: int) -> None:
        """Raise UserError for a step outside [0, last]."""
        if not 0 <= step <= last:
            raise UserError(f"step {step:,} is outside the schedule", allowed=f"0 to {last:,}")

    def check_positions(self, positions: npt.ArrayLike) -> Int64s:
        """Convert ``positions`` to int64. Raises UserError for a position outside the run."""
        at = np.asarray(positions, dtype=np.int64)
        if at.size and not (at.min() >= 0 and at.max() < self.total_positions):
            raise UserError(
                f"position {at.max() if at.min() >= 0 else at.min():,} is outside the run",
                allowed=f"0 to {self.total_positions - 1:,}",
            )
        return at
