"""Skipped positions: what would have stood there is left out, and each source moves up.

A skipped span of positions names, for each source, an interval of ordinals; later ordinals jump over it. So the
mixture and the edges of batches stay what they are. Spans apply in the order listed, each in terms of the order that
the ones before it leave. Behind a fork, what the steps before it jumped over comes first.
"""

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Gaps:
    """Ordinals of one source in one era that are left out, and the way from slots (0, 1, 2 ...) to the others."""

    def __init__(self, gaps: Sequence[tuple[int, int]] = ()) -> None:
        """``gaps``: what is left out to begin with, as ``passed`` gives it."""
        self._gaps = list(gaps)
        self._index()

    def take_out(self, first_slot: int, last_slot: int) -> None:
        """Leave out what the slots [first_slot, last_slot) read now."""
        if first_slot >= last_slot:
            return
        first, last = self.ordinals(np.array([first_slot, last_slot - 1])).tolist()
        insort(self._gaps, (first, last + 1))
        merged: list[tuple[int, int]] = []
        for begin, end in self._gaps:
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self._gaps = merged
        self._index()

    def passed(self, n_slots: int) -> list[tuple[int, int]]:
        """Spans of ordinals that the first ``n_slots`` slots jump over: all that chooses their ordinals."""
        return self._gaps[: int(np.searchsorted(self._slots, n_slots))]

    def ordinals(self, slots: Int64s) -> Int64s:
        """The ordinal that each slot [n] reads, int64 [n]."""
        if not self._gaps:
            return slots
        return slots + self._before[np.searchsorted(self._slots, slots, side="right")]

    def slots(self, ordinals: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """The slot that reads each ordinal [n], and whether one does."""
        if not self._gaps:
            return ordinals, np.ones(ordinals.shape, dtype=bool)
        index = np.searchsorted(self._begins, ordinals, side="right")
        kept = ordinals >= np.concatenate([[0], self._ends])[index]
        return ordinals - self._before[index], kept

    def _index(self) -> None:
        self._begins = np.array([begin for begin, _ in self._gaps], dtype=np.int64)
        self._ends = np.array([end for _, end in self._gaps], dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._begins)]).astype(np.int64)
        self._slots = self._begins - self._before[:-1]
