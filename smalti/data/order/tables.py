"""Tables of a schedule: cycles of counts with their place in training, and the source of each position of a batch.

In a batch the sequences of a source are spread evenly, each source with its own offset, so that rare sources are not
all on one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.data.order.interleave import Cycle

Int64s = npt.NDArray[np.int64]
Int16s = npt.NDArray[np.int16]
_CACHED_BATCHES = 64
_FINGERPRINT_MODULUS = (1 << 127) - 1
"""A Mersenne prime; see ``fingerprints``."""
_FINGERPRINT_BASE = int.from_bytes(b"smalti schedule", "big")
"""The point at which the polynomials of counts are evaluated; see ``fingerprints``."""


@dataclass(frozen=True)
class Batch:
    """The source of each position of a global batch: a function of the number of sequences of each source."""

    source: Int16s
    """[rows] source of each position."""
    nth_in_source: Int64s
    """[rows] number of earlier positions with the same source."""
    places: Int64s
    """[rows] positions sorted by source, then by position."""
    firsts: Int64s
    """[sources + 1] index of the first position of each source in ``places``."""


@lru_cache(maxsize=_CACHED_BATCHES)
def build_batch(counts: tuple[int, ...]) -> Batch:
    """Place the sequences of each source evenly over a batch; ``counts`` is [sources].

    The k-th of c sequences of the s-th of S sources is at (k + (s + 1/2) / S) / c of the batch. Sources without a
    sequence in the batch do not count.
    """
    each = np.array(counts, dtype=np.int64)
    firsts = np.concatenate([[0], np.cumsum(each)])
    of_source = np.repeat(np.arange(each.size), each)
    k = np.arange(firsts[-1]) - firsts[of_source]
    n_present = np.count_nonzero(each)
    nth_present = np.cumsum(each > 0) - 1
    # Quotients of whole numbers below 2**53: equal fractions are equal floats, and ties go to the earlier source.
    at = (2 * n_present * k + 2 * nth_present[of_source] + 1) / (2 * n_present * each[of_source])
    order = np.argsort(at, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    return Batch(of_source[order].astype(np.int16), k[order], places, firsts)


@dataclass(frozen=True)
class Table:
    """A cycle of counts with its place in training, and the sums that lookups need."""

    start_step: int
    n_steps: int
    first_position: int
    rows: int
    segment: int
    base: Int64s
    """[sources] slots of each source in the segment before the table."""
    counts: Int64s
    """[period, sources] sequences that each step takes, repeated."""
    sums: Int64s
    """[period + 1, sources] sums of the counts before each step of the period."""

    @classmethod
    def of(
        cls, cycle: Cycle, *, start_step: int, first_position: int, rows: int, segment: int, base: Int64s
    ) -> "Table":
        """Return the table of ``cycle`` at a place in training."""
        sums = np.zeros((len(cycle.counts) + 1, cycle.counts.shape[1]), dtype=np.int64)
        np.cumsum(cycle.counts, axis=0, out=sums[1:])
        return cls(start_step, cycle.n_steps, first_position, rows, segment, base, cycle.counts, sums)

    @property
    def end(self) -> Int64s:
        """[sources] slots of the segment before the step after the table."""
        return self.before(self.n_steps)

    def before(self, steps: int) -> Int64s:
        """Return the slots [sources] of the segment before step ``steps`` of the table."""
        turns, at = divmod(steps, len(self.counts))
        total: Int64s = self.base + turns * self.sums[-1] + self.sums[at]
        return total

    def batch(self, step: int) -> Batch:
        """Return the batch of step ``step`` of the table."""
        return build_batch(tuple(self.counts[step % len(self.counts)].tolist()))

    def locate(self, offsets: Int64s) -> tuple[Int16s, Int64s]:
        """Return source [n] and slot of the segment [n] of positions [n], counted from the table's first."""
        steps, rows = np.divmod(offsets, self.rows)
        if steps[0] == steps[-1] and (steps == steps[0]).all():
            step = int(steps[0])
            batch = self.batch(step)
            source = batch.source[rows]
            return source, self.before(step)[source] + batch.nth_in_source[rows]
        turns, at = np.divmod(steps, len(self.counts))
        source = np.empty(offsets.shape, dtype=np.int16)
        nth_in_source = np.empty(offsets.shape, dtype=np.int64)
        for mask, batch in self._by_batch(at):
            source[mask] = batch.source[rows[mask]]
            nth_in_source[mask] = batch.nth_in_source[rows[mask]]
        return source, self.base[source] + turns * self.sums[-1][source] + self.sums[at, source] + nth_in_source

    def position_of(self, source: int, slots: Int64s) -> Int64s:
        """Return the positions of slots [n] of one source, counted from the table's first."""
        turns, left = np.divmod(slots - self.base[source], self.sums[-1, source])
        sums = np.ascontiguousarray(self.sums[:, source])
        at = np.asarray(np.searchsorted(sums, left, side="right") - 1, dtype=np.int64)
        nth_in_source = left - sums[at]
        place = np.empty(slots.shape, dtype=np.int64)
        for mask, batch in self._by_batch(at):
            place[mask] = batch.places[batch.firsts[source] + nth_in_source[mask]]
        return np.asarray((turns * len(self.counts) + at) * self.rows + place, dtype=np.int64)

    def _by_batch(self, at: Int64s) -> Iterator[tuple[npt.NDArray[np.bool_], Batch]]:
        """Yield (mask, batch) for each group of steps ``at`` [n] of the period with equal counts."""
        # np.unique is avoided until the first batch: its first call imports numpy.ma, 15 ms.
        used = np.array(sorted(set(at.ravel().tolist())), dtype=np.int64)
        kinds: dict[tuple[int, ...], int] = {}
        kind_of = np.array([kinds.setdefault(tuple(counts), len(kinds)) for counts in self.counts[used].tolist()])
        kind = kind_of[np.searchsorted(used, at)]
        return ((kind == number, build_batch(counts)) for counts, number in kinds.items())


def check_indices(indices: npt.ArrayLike, size: int) -> Int64s:
    """Return ``indices`` [n] as int64. Raises UserError for one outside 0 .. size-1."""
    array = np.asarray(indices, dtype=np.int64)
    if array.size and not (array.min() >= 0 and array.max() < size):
        wrong = array.max() if array.min() >= 0 else array.min()
        raise UserError(f"index {wrong:,} is out of range", allowed=f"0 to {size - 1:,}")
    return array


def reorder_columns(counts: Int64s, before: Sequence[str], after: Sequence[str]) -> Int64s:
    """Reorder columns (the last axis) from the order ``before`` to ``after``; a new source has 0."""
    out = np.zeros((*counts.shape[:-1], len(after)), dtype=np.int64)
    for index, name in enumerate(before):
        out[..., after.index(name)] = counts[..., index]
    return out


def fingerprints(tables: Sequence[Table], end_step: int) -> list[int]:
    """Return a fingerprint of the counts of each source in the steps before ``end_step`` [sources].

    It is the polynomial sum over steps t of count_t * z**t modulo a prime of 127 bits. A table that repeats is a
    geometric series, so equal counts give equal numbers however they are divided into tables. Two different choices
    agree with a probability of steps / 2**127; the polynomial is not secure against deliberate collisions.
    """
    totals = [0] * tables[0].counts.shape[1]
    for table in tables:
        turns, rest = divmod(min(table.n_steps, end_step - table.start_step), len(table.counts))
        after = pow(_FINGERPRINT_BASE, len(table.counts), _FINGERPRINT_MODULUS)
        series = (pow(after, turns, _FINGERPRINT_MODULUS) - 1) * pow(after - 1, -1, _FINGERPRINT_MODULUS)
        begin = pow(_FINGERPRINT_BASE, table.start_step, _FINGERPRINT_MODULUS)
        last = begin * pow(after, turns, _FINGERPRINT_MODULUS)
        for source, column in enumerate(table.counts.T.tolist()):
            whole = _polynomial(column) * series * begin if turns else 0
            totals[source] = (totals[source] + whole + _polynomial(column[:rest]) * last) % _FINGERPRINT_MODULUS
    return totals


def _polynomial(values: Sequence[int]) -> int:
    total = 0
    for value in reversed(values):
        total = (total * _FINGERPRINT_BASE + value) % _FINGERPRINT_MODULUS
    return total
