"""Best-fit decreasing: packs documents into sequences without cutting one that fits into a sequence.

Longer documents are cut into whole sequences and a rest. Pieces are placed from the longest to the shortest, each into
the open sequence with the smallest sufficient room, or a new one (Ding et al., "Fewer truncations improve language
modeling", arXiv 2404.10830). Uses at most 11/9 of the minimum number of rows. Deterministic. Memory: about 40 bytes
per piece.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.sources.source import Int64s, Source

ALGORITHM = "best-fit-decreasing/1"
"""Changed whenever the same corpus would be packed differently."""

_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True)
class Rows:
    """Pieces by row; in a row in the order of the corpus. Row r has pieces [starts[r], starts[r + 1])."""

    starts: Int64s
    """[rows + 1]"""
    begins: Int64s
    """[pieces] first token of each; a piece's targets are tokens [begin, begin + length)."""
    lengths: "npt.NDArray[np.uint32]"
    """[pieces]"""
    places: npt.NDArray[Any]
    """[pieces] index in ``begins`` and ``lengths`` of the k-th piece of the corpus."""


def document_ends(source: Source, eod_id: int, *, scan_tokens: int = _SCAN_TOKENS) -> Int64s:
    """Return the end of each document [documents], after its closing token; reads all tokens.

    Tokens after the last closing token count as a document.
    """
    parts: list[Int64s] = []
    buffer = np.empty((1, min(scan_tokens, source.n_tokens)), dtype=source.dtype)
    for begin in range(0, source.n_tokens, scan_tokens):
        part = buffer[:, : min(scan_tokens, source.n_tokens - begin)]
        source.read_rows(np.array([begin], dtype=np.int64), part)
        parts.append(np.flatnonzero(part[0] == eod_id) + (begin + 1))
    ends = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
    if not ends.size or ends[-1] < source.n_tokens:
        ends = np.append(ends, source.n_tokens)
    return ends


def cut(ends: Int64s, seq_len: int) -> tuple[Int64s, "npt.NDArray[np.uint32]"]:
    """Cut documents into pieces of 1 to ``seq_len`` tokens; returns begins [pieces] and lengths [pieces], in order."""
    document_begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    per_document = -(-(ends - document_begins) // seq_len)
    if (per_document == 1).all():
        begins = document_begins
    else:
        first = np.cumsum(per_document) - per_document
        number = np.arange(int(per_document.sum()), dtype=np.int64) - np.repeat(first, per_document)
        begins = np.repeat(document_begins, per_document) + number * seq_len
    return begins, np.diff(begins, append=ends[-1:]).astype(np.uint32)


def assign(lengths: "npt.NDArray[np.uint32]", seq_len: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Assign pieces to rows. Returns the row of each piece [pieces], and the number of rows.

    Pieces of equal length are interchangeable, and so are rows of equal room: a row with room r takes r // l pieces of
    length l before another row is tried. So the work is per length and room, not per piece: an open row is updated only
    when its room more than halves, at most log2(seq_len) times. Two stable sorts of the pieces remain.
    """
    assert lengths.size < 1 << 32
    # Longest first, ties in the order of the corpus; numpy sorts 16-bit numbers by counting, six times as fast.
    shortfall = (seq_len - lengths).astype(np.uint16 if seq_len <= 1 << 16 else np.uint32)
    order = np.argsort(shortfall, kind="stable")
    counts = np.bincount(lengths, minlength=seq_len + 1)
    chosen = np.empty(lengths.size, dtype=np.uint32)
    open_rows = _OpenRows(seq_len)
    done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            rows, each = open_rows.take(length, left)
            placed = min(left, rows.size * each)
            chosen[done : done + placed] = np.repeat(rows, each)[:placed]
            open_rows.give(rows, each, length, placed)
            done += placed
            left -= placed
    out = np.empty_like(chosen)
    out[order] = chosen
    return out, open_rows.n_rows


class _OpenRows:
    """Rows with room left, in lists by room; rows are moved in batches."""

    def __init__(self, seq_len: int) -> None:
        self.n_rows = 0
        self._seq_len = seq_len
        self._rooms: list[int] = []
        self._lists: dict[int, list[npt.NDArray[np.uint32]]] = {}
        self._room = 0

    def take(self, length: int, wanted: int) -> tuple[npt.NDArray[np.uint32], int]:
        """Take rows of the smallest room of at least ``length``, at most as many as ``wanted`` pieces fill.

        Returns the rows, and the number of pieces that fit into each.
        """
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            self._room = self._seq_len
            each = self._seq_len // length
            n = -(-wanted // each)
            self.n_rows += n
            return np.arange(self.n_rows - n, self.n_rows, dtype=np.uint32), each
        self._room = self._rooms[at]
        each = self._room // length
        n = -(-wanted // each)
        lists = self._lists[self._room]
        rows = lists.pop()
        if rows.size > n:
            lists.append(rows[n:])
            rows = rows[:n]
        if not lists:
            del self._rooms[at], self._lists[self._room]
        return rows, each

    def give(self, rows: npt.NDArray[np.uint32], each: int, length: int, placed: int) -> None:
        """Return rows with their remaining room: each received ``each`` pieces, except perhaps the last."""
        full, rest = divmod(placed, each)
        self._add(self._room - each * length, rows[:full])
        if rest:
            self._add(self._room - rest * length, rows[full:])

    def _add(self, room: int, rows: npt.NDArray[np.uint32]) -> None:
        if not room or not rows.size:
            return
        if room not in self._lists:
            insort(self._rooms, room)
            self._lists[room] = []
        self._lists[room].append(rows)


def pack(ends: Int64s, seq_len: int) -> Rows:
    """Pack documents, given by their ends [documents], into rows of at most ``seq_len`` targets."""
    begins, lengths = cut(ends, seq_len)
    chosen, n_rows = assign(lengths, seq_len)
    starts = np.zeros(n_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(chosen, minlength=n_rows), out=starts[1:])
    order = np.argsort(chosen, kind="stable")
    places = np.empty(order.size, dtype=np.uint32)
    places[order] = np.arange(order.size, dtype=np.uint32)
    return Rows(starts, begins[order], lengths[order], places)


def n_cut_by_chopping(ends: Int64s, seq_len: int) -> int:
    """Count documents whose targets concatenate-and-chop puts into more than one sequence, or drops at the end."""
    begins = np.concatenate([[0], ends[:-1]])
    # token t is a target of sequence (t - 1) // seq_len; the very first token is not a target
    return int((np.maximum(begins - 1, 0) // seq_len != (ends - 2).clip(min=0) // seq_len).sum())
