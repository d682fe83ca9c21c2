"""The schedule of a run: which source every position reads from, and its how-manieth sequence, as arithmetic.

Words: a *span* is consecutive steps with one global batch, one seq_len and one set of weights; an *era* is consecutive
spans with one seq_len; a *slot* counts what a source was asked for since the era began; its *ordinal* is the same with
what is skipped counted too.

Promises: every global batch holds the floor or the ceiling of each source's exact share, and nothing of a source
without weight; |count - exact share| < 1 after every step, through all spans of an era. Positions of a batch are
spread, so that ranks and microbatches see about the mixture. Position -> (source, ordinal, era), its inverse and
counts before any step are binary searches in a few tables a span, whatever the length of the run; 64-bit integers.
Does not promise the share at every position inside a batch, only at its edges; counts its shares anew behind a fork
whose config would have begun otherwise.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.order.interleave import Rates, Segment, interleave
from smalti.data.order.mixture import Span, compile_spans
from smalti.data.order.skip import Gaps
from smalti.data.order.tables import Int16s, Int64s, Table, fingerprints, renamed

FORMAT = 2
MAX_POSITIONS = 1 << 46
MAX_SOURCES = (1 << 15) - 1
"""Indexes of sources are of 16 bits."""


@dataclass(frozen=True)
class Era:
    """Consecutive steps with one seq_len: every source's order begins anew in it."""

    start_step: int
    first_position: int
    seq_len: int


@dataclass(frozen=True)
class _Part:
    """Spans whose exact shares are counted together, from 0 at its first step: an era, or what follows a fork in it."""

    start_step: int
    spans: tuple[Span, ...]
    segments: Sequence[Segment]
    base: Int64s
    """[sources] slots of the era before the part: 0 but behind a fork."""


class Schedule:
    """Sources, spans and the choice they amount to. Sources are in alphabetical order, whatever the config's."""

    def __init__(
        self,
        sources: Sequence[str],
        spans: Sequence[Span],
        total_steps: int,
        *,
        skip: Sequence[tuple[int, int]] = (),
        former: "tuple[Schedule, int] | None" = None,
    ) -> None:
        """``spans``: starts rise from 0, the weights of each have the same sum. Behind a ``former`` schedule they begin
        at its step; everything before that step stays what it was."""
        if len(sources) > MAX_SOURCES:
            raise UserError(f"a run of {len(sources):,} sources", allowed=f"at most {MAX_SOURCES:,}")
        past, fork = former or (None, 0)
        self.sources, self.total_steps = tuple(sources), total_steps
        earlier = (
            [_renamed(span, past.sources, self.sources) for span in past.spans if span.start_step < fork]
            if past
            else []
        )
        self.unit = lcm(*(sum(span.weights) for span in (*earlier, *spans)))
        self.spans: tuple[Span, ...] = tuple(_in_units(span, self.unit) for span in (*earlier, *spans))
        """Consecutive steps with one global batch, one seq_len and one set of weights."""
        assert spans[0].start_step == fork
        self._starts = [span.start_step for span in self.spans]
        self._span_positions = [0]
        for span, start, end in zip(self.spans, self._starts, [*self._starts[1:], total_steps], strict=True):
            assert start < end
            self._span_positions.append(self._span_positions[-1] + (end - start) * span.rows)
        self.total_positions = self._span_positions[-1]
        if not 1 <= self.total_positions <= MAX_POSITIONS:
            raise UserError(f"a run of {self.total_positions:,} sequences", allowed=f"1 to {MAX_POSITIONS:,}")
        self.eras = tuple(
            Era(span.start_step, position, span.seq_len)
            for before, span, position in zip((None, *self.spans), self.spans, self._span_positions, strict=False)
            if before is None or before.seq_len != span.seq_len
        )
        self._era_starts = [era.start_step for era in self.eras]
        self._past = (fork, past) if past else None
        self._fork_position = self.first_position(fork)
        self._parts: list[_Part] = []
        self._tables: list[Table] = _cut(past, fork, self.sources) if past else []
        self._lay_out(fork)
        self._first_steps = [table.start_step for table in self._tables]
        self._first_positions = np.array([table.first_position for table in self._tables], dtype=np.int64)
        self.skip = self._check_skip(skip)
        self._gaps = self._take_out()

    # ------------------------------------------------------------------------------------------------ steps

    def rows(self, step: int) -> int:
        """Sequences in the global batch of ``step``."""
        return self.spans[self._span(step)].rows

    def seq_len(self, step: int) -> int:
        """Tokens in a sequence of ``step``."""
        return self.spans[self._span(step)].seq_len

    def era(self, step: int) -> int:
        """Index of the era of ``step``."""
        self._check_step(step, self.total_steps - 1)
        return bisect_right(self._era_starts, step) - 1

    def first_position(self, step: int) -> int:
        """Position of the first sequence of ``step``; for ``total_steps``, the end of the run."""
        self._check_step(step, self.total_steps)
        index = bisect_right(self._starts, step) - 1
        return self._span_positions[index] + (step - self._starts[index]) * self.spans[index].rows

    def step_of(self, positions: npt.ArrayLike) -> Int64s:
        """The step that each position [n] belongs to."""
        at = self._checked(positions)
        index = np.searchsorted(np.array(self._span_positions[:-1]), at, side="right") - 1
        rows = np.array([span.rows for span in self.spans])
        inside: Int64s = at - np.array(self._span_positions)[index]
        return np.asarray(np.array(self._starts)[index] + inside // rows[index], dtype=np.int64)

    # ------------------------------------------------------------------------------------------------ positions

    def locate(self, positions: npt.ArrayLike) -> tuple[Int16s, Int64s, Int16s]:
        """Positions [n] -> index of the source [n], ordinal in the era [n], index of the era [n]."""
        at = self._checked(positions)
        source, slot, era = self._slots(at)
        if self.skip:
            for key, gaps in self._gaps.items():
                here = (source == key[1]) & (era == key[0])
                slot[here] = gaps.ordinals(slot[here])
        return source, slot, era

    def position_of(self, source: int, era: int, ordinals: npt.ArrayLike) -> Int64s:
        """Where ordinals [n] of one source in one era stand: the inverse of ``locate``.

        Raises UserError for one that this run never comes to, or leaves out.
        """
        wanted = np.asarray(ordinals, dtype=np.int64)
        slots = wanted
        if (era, source) in self._gaps:
            slots, kept = self._gaps[era, source].slots(wanted)
            if not kept.all():
                raise UserError(
                    f"sequence {int(wanted[~kept].flat[0]):,} of source '{self.sources[source]}' in era {era}",
                    allowed="one that data.skip does not leave out",
                )
        tables = [table for table in self._tables if table.era == era]
        end = int(self._era_end(era)[source])
        if slots.size and not (slots.min() >= 0 and slots.max() < end):
            wrong = wanted.max() if wanted.min() >= 0 else wanted.min()
            last = int(self.ordinals_end(self._era_last_step(era), era)[source]) - 1
            raise UserError(
                f"sequence {wrong:,} of source '{self.sources[source]}' in era {era}",
                allowed=f"0 to {last:,}, which is all that this run reads of it" if end else "none: it is not read",
            )
        bases = np.array([table.base[source] for table in tables])
        table_of = np.searchsorted(bases, slots, side="right") - 1
        out = np.empty(wanted.shape, dtype=np.int64)
        for index in sorted(set(table_of.ravel().tolist())):
            here = table_of == index
            out[here] = tables[index].first_position + tables[index].position_of(source, slots[here])
        return out

    def counts(self, step: int, era: int | None = None) -> Int64s:
        """Sequences taken from each source [sources] in an era (absent: that of step - 1) by all steps before ``step``.

        An era that begins at ``step`` or later has taken none; one that has ended, all of its own.
        """
        era, step = self._in_era(step, era)
        if step == self.eras[era].start_step:
            return np.zeros(len(self.sources), dtype=np.int64)
        table = self._tables[bisect_right(self._first_steps, step - 1) - 1]
        return table.before(step - table.start_step)

    def shares(self, step: int, era: int | None = None) -> list[Fraction]:
        """The exact shares that ``counts`` stays within one of. Behind a fork they go on from its counts."""
        era, step = self._in_era(step, era)
        start, base = self.eras[era].start_step, [0] * len(self.sources)
        if step > start:
            start, base = self._share_base(step - 1)
        totals = [Fraction(number) for number in base]
        for span, end in zip(self.spans, [*self._starts[1:], self.total_steps], strict=True):
            n = (min(step, end) - max(span.start_step, start)) * span.rows
            if n > 0:
                totals = [t + Fraction(n * w, self.unit) for t, w in zip(totals, span.weights, strict=True)]
        return totals

    def ordinals_end(self, step: int, era: int | None = None) -> Int64s:
        """[sources] one more than the last ordinal that the steps before ``step`` read in an era; with skipped."""
        era, step = self._in_era(step, era)
        ends = self.counts(step, era)
        for (of_era, source), gaps in self._gaps.items():
            if of_era == era and ends[source]:
                ends[source] = gaps.ordinals(ends[source : source + 1] - 1)[0] + 1
        return ends

    # ------------------------------------------------------------------------------------------------ identity

    @property
    def digest(self) -> str:
        """Names the choice of every position. The end of the run is left out: a longer run begins alike."""
        return digest_json([FORMAT, list(self.sources), self._history(), [list(pair) for pair in self.skip]])

    def past_digest(self, step: int) -> str:
        """Names the choice of every position before ``step``: two schedules whose batches agree as far as there have
        the same digest, whatever weights and stages they come from and whatever comes later."""
        self._check_step(step, self.total_steps)
        passed = [
            [number, self.sources[source], gaps.passed(int(self.counts(step, number)[source]))]
            for (number, source), gaps in sorted(self._gaps.items())
            if self.eras[number].start_step < step
        ]
        skipped = [one for one in passed if one[-1]]
        eras = [[era.start_step, era.seq_len] for era in self.eras if era.start_step < step]
        prints = fingerprints([table for table in self._tables if table.start_step < step], step)
        taken = {name: f"{value:x}" for name, value in zip(self.sources, prints, strict=True) if value}
        return digest_json([FORMAT, step, eras, taken, skipped])

    def then(
        self,
        step: int,
        sources: Sequence[str],
        spans: Sequence[Span],
        total_steps: int,
        *,
        skip: Sequence[tuple[int, int]] = (),
    ) -> "Schedule":
        """This schedule before ``step``, another future from there on (a fork). ``spans`` begin at ``step``.

        Counts of sources go on where seq_len stays, so nothing repeats sooner; exact shares are counted from the fork.
        ``skip`` lists all spans of positions; those that begin before the fork must be this schedule's own. One that
        reaches over the fork leaves out what it did, of each source where it had begun; it applies before all others.
        """
        self._check_step(step, self.total_steps)
        assert step >= 1, "a fork before the first step is another run"
        begun = self.first_position(step)
        mine, given = ([pair for pair in pairs if pair[0] < begun] for pairs in (self.skip, [tuple(p) for p in skip]))
        if mine != given:
            raise UserError(
                f"data.skip before position {begun:,}, where the fork begins: {given}", allowed=f"what it was: {mine}"
            )
        names = sorted({*self.sources, *sources})
        moved = [_renamed(span, sources, names) for span in spans]
        return Schedule(names, moved, total_steps, skip=skip, former=(self, step))

    # ------------------------------------------------------------------------------------------------ inside

    def _lay_out(self, fork: int) -> None:
        """Parts and tables of all spans from ``fork`` on."""
        spans = [span for span in self.spans if span.start_step >= fork]
        ends = [*(span.start_step for span in spans[1:]), self.total_steps]
        begin = 0
        for index in range(1, len(spans) + 1):
            if index < len(spans) and spans[index].seq_len == spans[begin].seq_len:
                continue
            mine = tuple(spans[begin:index])
            rates = [
                Rates(end - s.start_step, s.rows, s.weights) for s, end in zip(mine, ends[begin:index], strict=True)
            ]
            start = mine[0].start_step
            goes_on = self._tables and start not in self._era_starts
            base = (
                self._tables[-1].before(self._tables[-1].n_steps) if goes_on else np.zeros(len(self.sources), np.int64)
            )
            part = _Part(start, mine, interleave(rates, self.unit), base)
            self._parts.append(part)
            self._place(part)
            begin = index

    def _place(self, part: _Part) -> None:
        base = part.base
        for segment in part.segments:
            step = part.start_step + segment.start_step
            table = Table.of(
                segment,
                start_step=step,
                first_position=self.first_position(step),
                rows=self.rows(step),
                era=self.era(step),
                base=base,
            )
            self._tables.append(table)
            base = table.before(table.n_steps)

    def _slots(self, at: Int64s) -> tuple[Int16s, Int64s, Int16s]:
        source, slot = np.empty(at.shape, dtype=np.int16), np.empty(at.shape, dtype=np.int64)
        era = np.empty(at.shape, dtype=np.int16)
        table_of = np.searchsorted(self._first_positions, at, side="right") - 1
        for index in sorted(set(table_of.ravel().tolist())):
            table, here = self._tables[index], table_of == index
            source[here], slot[here] = table.locate(at[here] - table.first_position)
            era[here] = table.era
        return source, slot, era

    def _check_skip(self, skip: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        for index, (begin, end) in enumerate(skip):
            if begin >= self._fork_position and not 0 <= begin < end <= self.total_positions:
                raise UserError(
                    f"data.skip[{index}] is [{begin:,}, {end:,})",
                    allowed=f"a begin below its end, both within the run's {self.total_positions:,} positions",
                )
        return tuple((begin, end) for begin, end in skip)

    def _take_out(self) -> dict[tuple[int, int], Gaps]:
        """(era, source) -> what is left out; before a fork what was, whatever a span of positions means by now."""
        gaps = self._passed_gaps()
        ends = [*(era.first_position for era in self.eras[1:]), self.total_positions]
        for begin, end in self.skip:
            for number, (era, era_end) in enumerate(zip(self.eras, ends, strict=True)):
                first, last = max(begin, era.first_position), min(end, era_end)
                if first >= last or last <= self._fork_position:
                    continue
                low, high = self._slots_before(first, number), self._slots_before(last, number)
                if first < self._fork_position:  # where it had begun for a source, it came with the past as a whole
                    high = np.where(low < self._slots_before(self._fork_position, number), low, high)
                for source in np.flatnonzero(low < high).tolist():
                    gaps.setdefault((number, source), Gaps()).take_out(int(low[source]), int(high[source]))
        return gaps

    def _passed_gaps(self) -> dict[tuple[int, int], Gaps]:
        """What the steps before the fork jumped over."""
        if not self._past:
            return {}
        fork, past = self._past
        return {
            (era, self.sources.index(past.sources[source])): Gaps(gaps.passed(int(past.counts(fork, era)[source])))
            for (era, source), gaps in past._gaps.items()
            if past.eras[era].start_step < fork
        }

    def _slots_before(self, position: int, era: int) -> Int64s:
        """[sources] slots of an era at positions before ``position``, which need not be the edge of a batch."""
        step = int(self.step_of([position - 1])[0]) if position > self.eras[era].first_position else None
        if step is None:
            return np.zeros(len(self.sources), dtype=np.int64)
        total = self.counts(step, era)
        inside = position - self.first_position(step)
        table = self._tables[bisect_right(self._first_steps, step) - 1]
        sources = table.batch(step - table.start_step).source[:inside]
        return total + np.bincount(sources, minlength=len(self.sources))

    def _share_base(self, step: int) -> tuple[int, list[int]]:
        """(first step, counts) from which the exact shares of the part of ``step`` are counted."""
        if self._past and step < self._past[0]:
            start, base = self._past[1]._share_base(step)
            return start, renamed(np.array(base), self._past[1].sources, self.sources).tolist()
        part = [part for part in self._parts if part.start_step <= step][-1]
        return part.start_step, part.base.tolist()

    def _history(self) -> list[Any]:
        """What fixes all choices, as JSON."""
        records: list[Any] = []
        if self._past:
            fork, past = self._past
            records.append(["fork", fork, past.past_digest(fork)])
        for part in self._parts:
            for span in part.spans:
                record = _record(span, self.sources)
                if not records or records[-1][1:] != record[1:]:
                    records.append(record)
        return records

    def _in_era(self, step: int, era: int | None) -> tuple[int, int]:
        """The era meant, and ``step`` brought inside it."""
        self._check_step(step, self.total_steps)
        if era is None:
            return bisect_right(self._era_starts, max(step - 1, 0)) - 1, step
        return era, min(max(step, self.eras[era].start_step), self._era_last_step(era))

    def _era_last_step(self, era: int) -> int:
        return self.eras[era + 1].start_step if era + 1 < len(self.eras) else self.total_steps

    def _era_end(self, era: int) -> Int64s:
        return self.counts(self._era_last_step(era), era)

    def _span(self, step: int) -> int:
        self._check_step(step, self.total_steps - 1)
        return bisect_right(self._starts, step) - 1

    def _check_step(self, step: int, last: int) -> None:
        if not 0 <= step <= last:
            raise UserError(f"step {step:,} of the schedule", allowed=f"0 to {last:,}")

    def _checked(self, positions: npt.ArrayLike) -> Int64s:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and not (at.min() >= 0 and at.max() < self.total_positions):
            raise UserError(
                f"position {at.max() if at.min() >= 0 else at.min():,} lies outside the run",
                allowed=f"0 to {self.total_positions - 1:,}",
            )
        return at


def build_schedule(data: DataConfig, length: RunLength, *, former: tuple[Schedule, int] | None = None) -> Schedule:
    """The schedule of a run: its past by ``data.history``, as far as the last fork, and this future after it.

    ``former``, (schedule, step), is that past where it is at hand. Stages and ramps are laid out from the start of the
    run in either case. A fork that continues the order leaves no trace in it. Raises UserError for a stage that would
    have no step or ends beyond the run, for a batch that is not whole sequences, and for a skip outside the run.
    """
    sources = sorted(data.sources)
    while former is None and data.history and data.history[-1].order_continues:
        data = data.model_copy(update={"history": data.history[:-1]})
    if former is None and data.history:
        former = (build_schedule(*data.before_fork()), data.history[-1].at_step)
    if former is None:
        return Schedule(sources, compile_spans(data, length, sources), length.total_steps, skip=data.skip)
    schedule, step = former
    if not 1 <= step < length.total_steps:
        raise UserError(f"a fork at step {step:,}", allowed=f"1 to {length.total_steps - 1:,}, inside the new run")
    future = compile_spans(data, length, sources, from_step=step)
    return schedule.then(step, sources, future, length.total_steps, skip=data.skip)


def tokens_by_source(data: DataConfig, length: RunLength) -> dict[str, int]:
    """Tokens that a whole run takes from each source, as the stream will hand them out. Raises like the schedule."""
    schedule = build_schedule(data, length)
    return tokens_before(schedule, schedule.total_steps)


def tokens_before(schedule: Schedule, step: int) -> dict[str, int]:
    """Tokens that the steps before ``step`` take from each source."""
    total = sum(
        (schedule.counts(step, number) * era.seq_len for number, era in enumerate(schedule.eras)),
        np.zeros(len(schedule.sources), dtype=np.int64),
    )
    return dict(zip(schedule.sources, total.tolist(), strict=True))


def _record(span: Span, sources: Sequence[str]) -> list[Any]:
    """A span as JSON: where it begins, and what it chooses; independent of the unit and of sources without weight."""
    common = gcd(*span.weights)
    weights = {name: weight // common for name, weight in zip(sources, span.weights, strict=True) if weight}
    return [span.start_step, span.rows, span.seq_len, weights]


def _cut(past: Schedule, step: int, sources: Sequence[str]) -> list[Table]:
    """Tables of a former schedule as far as ``step``."""
    return [
        replace(
            table,
            n_steps=min(table.n_steps, step - table.start_step),
            base=renamed(table.base, past.sources, sources),
            counts=renamed(table.counts, past.sources, sources),
            sums=renamed(table.sums, past.sources, sources),
        )
        for table in past._tables
        if table.start_step < step
    ]


def _renamed(span: Span, before: Sequence[str], after: Sequence[str]) -> Span:
    weights: Mapping[str, int] = dict(zip(before, span.weights, strict=True))
    return replace(span, weights=tuple(weights.get(name, 0) for name in after))


def _in_units(span: Span, unit: int) -> Span:
    factor = unit // sum(span.weights)
    return replace(span, weights=tuple(weight * factor for weight in span.weights))
