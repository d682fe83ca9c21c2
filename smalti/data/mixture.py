"""The mixture over time: which source every position of training reads from, as arithmetic.

A *schedule* is a list of stages with whole-number weights. At any position, in any stage, the number of sequences
taken from a source differs from its exact share by less than one; what is lacking or ahead at the end of a stage is
carried into the next. The n-th sequence that a source is asked for (its *ordinal*) goes on across stages, so nothing
repeats before the source is exhausted.

Promises: position -> (source, ordinal), its inverse, and counts before any position, by binary search over at most
three segments a stage, without an array as long as training; 64-bit integers all through. See ``interleave`` for the
one thing it does not promise about a source without weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, lcm

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.config.data import DataConfig
from smalti.config.schema import split_duration
from smalti.data.interleave import Segment, interleave

FORMAT = 1
UNIT = 1 << 16
"""Weights are whole 65,536ths, unless fewer parts express all of them exactly (0.8 and 0.2 are 4 and 1 of 5)."""
MAX_POSITIONS = 1 << 46

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """A span of positions with one mixture; it ends where the next begins."""

    start: int
    weights: tuple[int, ...]
    """Whole-number share of each source of the schedule, in its order; 0 for an absent source."""

    @property
    def digest(self) -> str:
        """Names the stage."""
        return digest_json([self.start, list(self.weights)])


@dataclass(frozen=True)
class _Table:
    """A segment and what is needed to count in it."""

    segment: Segment
    rank: Int64s
    """[slots] how many slots before have the same source."""
    slots: tuple[Int64s, ...]
    """For each source the slots that read from it."""
    per_turn: Int64s
    """[sources] sequences of each source in one turn of the table."""


class Schedule:
    """Sources, stages and the choice they amount to. Sources are in alphabetical order, whatever the config's."""

    def __init__(self, sources: Sequence[str], stages: Sequence[Stage], total_positions: int) -> None:
        """``stages``: starts rise from 0, weights sum to the same number in every stage."""
        self.sources, self.stages, self.total_positions = tuple(sources), tuple(stages), total_positions
        if not 1 <= total_positions <= MAX_POSITIONS:
            raise UserError(f"a run of {total_positions:,} sequences", allowed=f"1 to {MAX_POSITIONS:,}")
        starts = [stage.start for stage in stages]
        self.unit = sum(stages[0].weights)
        assert starts[0] == 0
        assert all(a < b for a, b in zip(starts, [*starts[1:], total_positions], strict=True))
        assert all(sum(stage.weights) == self.unit and len(stage.weights) == len(sources) for stage in stages)
        segments = interleave(starts, [stage.weights for stage in stages], self.unit, total_positions)
        self._tables = [_index(segment, len(sources)) for segment in segments]
        self._starts = np.array([segment.start for segment in segments], dtype=np.int64)
        self._bases = np.zeros((len(segments), len(sources)), dtype=np.int64)
        for i, table in enumerate(self._tables[:-1]):
            self._bases[i + 1] = self._bases[i] + _count(table, table.segment.length)

    @property
    def digest(self) -> str:
        """Names the choice of every position. The end of the run is left out: a longer run begins alike."""
        return digest_json([FORMAT, list(self.sources), [stage.digest for stage in self.stages]])

    def locate(self, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int16], Int64s]:
        """Positions [n] -> index of the source [n], ordinal within the source [n]."""
        at = self._checked(positions)
        segment_of = np.searchsorted(self._starts, at, side="right") - 1
        source = np.empty(at.shape, dtype=np.int16)
        ordinal = np.empty(at.shape, dtype=np.int64)
        for index in np.unique(segment_of):
            table = self._tables[index]
            here = segment_of == index
            turns, slot = np.divmod(at[here] - self._starts[index], table.rank.size)
            chosen = table.segment.choice[slot]
            source[here] = chosen
            ordinal[here] = self._bases[index, chosen] + turns * table.per_turn[chosen] + table.rank[slot]
        return source, ordinal

    def position_of(self, source: int, ordinals: npt.ArrayLike) -> Int64s:
        """Where the given sequences [n] of one source stand in training: the inverse of ``locate``.

        Raises UserError for an ordinal that this run never comes to.
        """
        wanted = np.asarray(ordinals, dtype=np.int64)
        end = int(self.counts(self.total_positions)[source])
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < end):
            raise UserError(
                f"sequence {wanted.max() if wanted.min() >= 0 else wanted.min():,} of source '{self.sources[source]}'",
                allowed=f"0 to {end - 1:,}, which is all that this run reads of it",
            )
        segment_of = np.searchsorted(self._bases[:, source], wanted, side="right") - 1
        out = np.empty(wanted.shape, dtype=np.int64)
        for index in np.unique(segment_of):
            table = self._tables[index]
            here = segment_of == index
            turns, rank = np.divmod(wanted[here] - self._bases[index, source], table.per_turn[source])
            out[here] = self._starts[index] + turns * table.rank.size + table.slots[source][rank]
        return out

    def counts(self, position: int) -> Int64s:
        """Sequences taken from each source [sources] by all positions before ``position``."""
        if not 0 <= position <= self.total_positions:
            raise UserError(f"position {position:,}", allowed=f"0 to {self.total_positions:,}")
        index = max(int(np.searchsorted(self._starts, position, side="left")) - 1, 0)
        base: Int64s = self._bases[index]
        return base + _count(self._tables[index], position - int(self._starts[index]))

    def shares(self, position: int) -> list[Fraction]:
        """The exact shares T_s(position) that the counts stay within one of."""
        totals = [Fraction(0)] * len(self.sources)
        ends = [*(stage.start for stage in self.stages[1:]), self.total_positions]
        for stage, end in zip(self.stages, ends, strict=True):
            length = max(0, min(position, end) - stage.start)
            totals = [t + Fraction(length * w, self.unit) for t, w in zip(totals, stage.weights, strict=True)]
        return totals

    def _checked(self, positions: npt.ArrayLike) -> Int64s:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and not (at.min() >= 0 and at.max() < self.total_positions):
            raise UserError(
                f"position {at.max() if at.min() >= 0 else at.min():,} lies outside the run",
                allowed=f"0 to {self.total_positions - 1:,}",
            )
        return at


def quantise(weights: Mapping[str, float], unit: int) -> dict[str, int]:
    """Whole-number weights that sum to ``unit``, by largest remainder, none below 1 (ties: the earlier name)."""
    if len(weights) > unit:
        raise UserError(f"{len(weights):,} sources in one stage", allowed=f"at most {unit:,}")
    exact = _fractions(weights)
    floors = {name: max(1, floor(share * unit)) for name, share in exact.items()}
    rest = {name: exact[name] * unit - floors[name] for name in exact}
    missing = unit - sum(floors.values())
    for name in sorted(exact, key=lambda name: (-rest[name], name))[: max(missing, 0)]:
        floors[name] += 1
    while missing < 0:  # minima of 1 were given out: they come from whoever has most above its exact share
        giver = max(
            (name for name in floors if floors[name] > 1), key=lambda name: (floors[name] - exact[name] * unit, name)
        )
        floors[giver] -= 1
        missing += 1
    return floors


def build_schedule(data: DataConfig, total_positions: int, global_batch_sequences: int) -> Schedule:
    """The schedule of a run of ``total_positions`` sequences. Stages end at whole steps (rounded to the nearest).

    Raises UserError for a stage that would have no step, and for one that ends beyond the run.
    """
    assert global_batch_sequences >= 1
    assert total_positions % global_batch_sequences == 0
    sources = sorted(data.sources)
    unit = lcm(*(_denominator(stage.weights) for stage in data.stages))
    unit = unit if unit <= UNIT else UNIT
    stages: list[Stage] = []
    total_steps = total_positions // global_batch_sequences
    start = 0
    for index, stage in enumerate(data.stages):
        end = _end_step(stage.until, total_steps, global_batch_sequences * data.seq_len)
        if not start < end <= total_steps:
            raise UserError(
                f"data.stages[{index}] ends at '{stage.until}', which is step {end:,}; it begins at step {start:,}",
                allowed=f"an end after step {start:,} and not after the last step, {total_steps:,}",
                hint=f"give data.stages[{index}].until a later end, or make the run longer (train.duration)"
                if end <= start
                else f"give data.stages[{index}].until an earlier end, or make the run longer (train.duration)",
            )
        weights = quantise(stage.weights, unit)
        stages.append(Stage(start * global_batch_sequences, tuple(weights.get(name, 0) for name in sources)))
        start = end
    return Schedule(sources, stages, total_positions)


def tokens_by_source(data: DataConfig, *, total_steps: int, global_batch_tokens: int) -> dict[str, int]:
    """Tokens that a whole run takes from each source, as the stream will hand them out. Raises like the schedule."""
    sequences = global_batch_tokens // data.seq_len
    schedule = build_schedule(data, total_steps * sequences, sequences)
    counts = schedule.counts(schedule.total_positions)
    return {name: int(count) * data.seq_len for name, count in zip(schedule.sources, counts, strict=True)}


def _end_step(until: str, total_steps: int, step_tokens: int) -> int:
    amount, kind = split_duration(until)
    steps = {"run": amount * total_steps, "step": amount, "tok": amount / step_tokens}[kind]
    return floor(steps + 0.5)


def _fractions(weights: Mapping[str, float]) -> dict[str, Fraction]:
    # str gives the decimal that the user wrote: 0.1 is a tenth, not 3602879701896397 / 2**55
    parts = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _denominator(weights: Mapping[str, float]) -> int:
    return lcm(*(share.denominator for share in _fractions(weights).values()))


def _index(segment: Segment, n_sources: int) -> _Table:
    by_source = np.argsort(segment.choice, kind="stable")
    per_turn = np.bincount(segment.choice, minlength=n_sources).astype(np.int64)
    firsts = np.concatenate([[0], np.cumsum(per_turn)])
    rank = np.empty(by_source.size, dtype=np.int64)
    rank[by_source] = np.arange(by_source.size) - np.repeat(firsts[:-1], per_turn)
    return _Table(segment, rank, tuple(np.split(by_source, firsts[1:-1])), per_turn)


def _count(table: _Table, length: int) -> Int64s:
    """Sequences of each source in the first ``length`` positions of a segment."""
    turns, cut = divmod(length, table.rank.size)
    part = np.array([np.searchsorted(slots, cut) for slots in table.slots], dtype=np.int64)
    return turns * table.per_turn + part
