"""The schedule of a run: maps each position to a source and the ordinal of a sequence of it, by arithmetic.

A *slot* numbers the sequences that a segment takes from a source; an *ordinal* also counts those that ``data.skip``
leaves out. Each batch has the floor or the ceiling of each source's exact share; |count - exact share| < 1 after every
step of a segment (counted from the last fork that changed the order). Lookups are binary searches.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.order.fork import ParentState, copy_parent_state
from smalti.data.order.lookup import build_lookup
from smalti.data.order.mixture import compile_spans
from smalti.data.order.skip import build_gaps
from smalti.data.order.spans import Span, Timeline
from smalti.data.order.tables import Int16s, Int64s, fingerprints

FORMAT = 2
MAX_SOURCES = (1 << 15) - 1
"""Indexes of sources have 16 bits."""


class Schedule:
    """Maps positions to sources and ordinals, and back. ``sources`` are in alphabetical order."""

    def __init__(
        self,
        sources: Sequence[str],
        spans: Sequence[Span],
        total_steps: int,
        *,
        skip: Sequence[tuple[int, int]] = (),
        parent: "Schedule | None" = None,
        fork_step: int = 0,
    ) -> None:
        """``spans``: consecutive from ``fork_step``. ``parent``: the schedule of the steps before ``fork_step``."""
        if len(sources) > MAX_SOURCES:
            raise UserError(f"a run cannot have {len(sources):,} sources", allowed=f"at most {MAX_SOURCES:,}")
        self.sources = tuple(sources)
        self._parent: ParentState | None = copy_parent_state(parent, fork_step, self.sources) if parent else None
        self._fork_step = fork_step
        assert (parent is None) == (fork_step == 0)
        assert spans[0].start_step == fork_step
        all_spans = [*(self._parent.spans if self._parent else ()), *spans]
        self.unit = lcm(*(sum(span.weights) for span in all_spans))
        self.timeline = Timeline([span.in_units(self.unit) for span in all_spans], total_steps)
        self.spans = self.timeline.spans
        self.segments = self.timeline.segments
        self.total_steps = total_steps
        self.total_positions = self.timeline.total_positions
        self.lookup = build_lookup(
            self.timeline,
            self.unit,
            len(self.sources),
            fork_step,
            self._parent.tables if self._parent else [],
            self._parent.share_bases if self._parent else [],
        )
        self.skip = tuple((begin, end) for begin, end in skip)
        gaps = self._parent.gaps if self._parent else {}
        self.gaps = build_gaps(self.skip, self.timeline, self.lookup, gaps, fork_step)

    def rows(self, step: int) -> int:
        """Return the number of sequences in the global batch of ``step``."""
        return self.timeline.span(step).rows

    def seq_len(self, step: int) -> int:
        """Return the number of tokens in a sequence of ``step``."""
        return self.timeline.span(step).seq_len

    def segment(self, step: int) -> int:
        """Return the index of the segment of ``step``."""
        return self.timeline.segment(step)

    def first_position(self, step: int) -> int:
        """Return the position of the first sequence of ``step``; for ``total_steps``, the end of the run."""
        return self.timeline.first_position(step)

    def step_of(self, positions: npt.ArrayLike) -> Int64s:
        """Return the step of each position [n]."""
        return self.timeline.step_of(positions)

    def locate(self, positions: npt.ArrayLike) -> tuple[Int16s, Int64s, Int16s]:
        """Return source index [n], ordinal in the segment [n] and segment index [n] of positions [n]."""
        source, slot, segment = self.lookup.locate(self.timeline.check_positions(positions))
        if self.skip:
            for key, gaps in self.gaps.items():
                mask = (source == key[1]) & (segment == key[0])
                slot[mask] = gaps.ordinals(slot[mask])
        return source, slot, segment

    def position_of(self, source: int, segment: int, ordinals: npt.ArrayLike) -> Int64s:
        """Return the positions of ordinals [n] of one source in one segment: the inverse of ``locate``.

        Raises UserError for an ordinal that the run skips or never reads.
        """
        wanted = np.asarray(ordinals, dtype=np.int64)
        slots = wanted
        if (segment, source) in self.gaps:
            slots, is_read = self.gaps[segment, source].slots(wanted)
            if not is_read.all():
                raise UserError(
                    f"sequence {int(wanted[~is_read].flat[0]):,} of source '{self.sources[source]}' in segment "
                    f"{segment} is skipped",
                    allowed="a sequence that data.skip does not leave out",
                )
        end_step = self.timeline.segment_end(segment)
        end = int(self.counts(end_step, segment)[source])
        if slots.size and not (slots.min() >= 0 and slots.max() < end):
            wrong = wanted.max() if wanted.min() >= 0 else wanted.min()
            last = int(self.ordinals_end(end_step, segment)[source]) - 1
            raise UserError(
                f"sequence {wrong:,} of source '{self.sources[source]}' in segment {segment} is outside the run",
                allowed=f"0 to {last:,}, all that this run reads" if end else "none: this run does not read the source",
            )
        return self.lookup.position_of(source, segment, slots)

    def counts(self, step: int, segment: int | None = None) -> Int64s:
        """Return the sequences [sources] that the steps before ``step`` take in a segment (None: that of ``step - 1``).

        This is 0 for a segment that begins at ``step`` or later, and the whole segment if it has ended.
        """
        segment, step = self.timeline.clamp(step, segment)
        if step == self.segments[segment].start_step:
            return np.zeros(len(self.sources), dtype=np.int64)
        return self.lookup.counts(step)

    def shares(self, step: int, segment: int | None = None) -> list[Fraction]:
        """Return the exact shares [sources], from which ``counts`` differs by less than 1.

        After a fork the shares start from the counts at the fork.
        """
        segment, step = self.timeline.clamp(step, segment)
        start = self.segments[segment].start_step
        totals = [Fraction(0)] * len(self.sources)
        if step > start:
            start, base = self.lookup.share_base(step - 1)
            totals = [Fraction(count) for count in base.tolist()]
        for index, span in enumerate(self.spans):
            n = (min(step, self.timeline.end_step(index)) - max(span.start_step, start)) * span.rows
            if n > 0:
                totals = [t + Fraction(n * w, self.unit) for t, w in zip(totals, span.weights, strict=True)]
        return totals

    def ordinals_end(self, step: int, segment: int | None = None) -> Int64s:
        """Return the last ordinal that the steps before ``step`` read in a segment, plus one [sources]."""
        segment, step = self.timeline.clamp(step, segment)
        ends = self.counts(step, segment)
        for (gap_segment, source), gaps in self.gaps.items():
            if gap_segment == segment and ends[source]:
                ends[source] = gaps.ordinals(ends[source : source + 1] - 1)[0] + 1
        return ends

    @property
    def digest(self) -> str:
        """Digest of all choices except the end of the run, so that a longer run has the same one."""
        return digest_json([FORMAT, list(self.sources), self._history(), [list(pair) for pair in self.skip]])

    def past_digest(self, step: int) -> str:
        """Return the digest of the choices of all positions before ``step``.

        Two schedules with equal batches before ``step`` have the same one, whatever their stages and later steps.
        """
        self.timeline.check_step(step, self.total_steps)
        passed = [
            [number, self.sources[source], gaps.passed(int(self.counts(step, number)[source]))]
            for (number, source), gaps in sorted(self.gaps.items())
            if self.segments[number].start_step < step
        ]
        skipped = [record for record in passed if record[-1]]
        segments = [[segment.start_step, segment.seq_len] for segment in self.segments if segment.start_step < step]
        numbers = fingerprints([table for table in self.lookup.tables if table.start_step < step], step)
        taken = {name: f"{number:x}" for name, number in zip(self.sources, numbers, strict=True) if number}
        return digest_json([FORMAT, step, segments, taken, skipped])

    def _history(self) -> list[Any]:
        """Return everything that determines the choice of sequences, as JSON."""
        records: list[Any] = []
        if self._parent:
            records.append(["fork", self._fork_step, self._parent.schedule.past_digest(self._fork_step)])
        for span in self.spans:
            record = span.record(self.sources)
            if span.start_step >= self._fork_step and (not records or records[-1][1:] != record[1:]):
                records.append(record)
        return records

    def fork(
        self,
        step: int,
        sources: Sequence[str],
        spans: Sequence[Span],
        total_steps: int,
        *,
        skip: Sequence[tuple[int, int]] = (),
    ) -> "Schedule":
        """Return a schedule that equals this one before ``step`` and has ``spans``, which begin there, from then on.

        Counts of sources continue if seq_len stays, so that nothing repeats sooner; exact shares are counted from the
        fork. ``skip`` lists all spans of positions. Those that begin before the fork must equal this schedule's, else
        UserError; if one extends beyond the fork, each source of which it had begun to skip skips the same sequences,
        and the other spans apply after that.
        """
        self.timeline.check_step(step, self.total_steps)
        assert step >= 1, "a fork before the first step is another run"
        fork_position = self.first_position(step)
        before = [pair for pair in self.skip if pair[0] < fork_position]
        after = [tuple(pair) for pair in skip if pair[0] < fork_position]
        if before != after:
            raise UserError(
                f"data.skip before position {fork_position:,}, where the fork begins, was changed to {after}",
                allowed=f"the spans of the run: {before}",
            )
        names = sorted({*self.sources, *sources})
        new_spans = [span.for_sources(sources, names) for span in spans]
        return Schedule(names, new_spans, total_steps, skip=skip, parent=self, fork_step=step)


def build_schedule(
    data: DataConfig, length: RunLength, *, parent: Schedule | None = None, fork_step: int = 0
) -> Schedule:
    """Return the schedule of a run: that of ``data.history`` until the last fork, and of this config from then on.

    ``parent``: the schedule until the last fork, at ``fork_step``, if it is known. Stages and ramps count from the
    start of the run in either case. A fork that continues the order does not change it. Raises UserError for a stage
    without a step or beyond the run, for a batch that is not whole sequences, and for a skip outside the run.
    """
    sources = sorted(data.sources)
    while parent is None and data.history and data.history[-1].order_continues:
        data = data.model_copy(update={"history": data.history[:-1]})
    if parent is None and data.history:
        parent = build_schedule(*data.before_fork())
        fork_step = data.history[-1].at_step
    if parent is None:
        return Schedule(sources, compile_spans(data, length, sources), length.total_steps, skip=data.skip)
    if not 1 <= fork_step < length.total_steps:
        raise UserError(
            f"a run cannot be forked at step {fork_step:,}",
            allowed=f"1 to {length.total_steps - 1:,}, inside the new run",
        )
    spans = compile_spans(data, length, sources, from_step=fork_step)
    return parent.fork(fork_step, sources, spans, length.total_steps, skip=data.skip)


def tokens_by_source(data: DataConfig, length: RunLength) -> dict[str, int]:
    """Return the tokens that a whole run takes from each source. Raises the errors of ``build_schedule``."""
    schedule = build_schedule(data, length)
    return tokens_before(schedule, schedule.total_steps)


def tokens_before(schedule: Schedule, step: int) -> dict[str, int]:
    """Return the tokens that the steps before ``step`` take from each source."""
    total = sum(
        (schedule.counts(step, number) * segment.seq_len for number, segment in enumerate(schedule.segments)),
        np.zeros(len(schedule.sources), dtype=np.int64),
    )
    return dict(zip(schedule.sources, total.tolist(), strict=True))
