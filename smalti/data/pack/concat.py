"""Concatenate-and-chop: how sequences are cut from the tokens of a source, when they are read.

Sequence i of a source is tokens [i * seq_len, i * seq_len + seq_len + 1): seq_len inputs and, one further, seq_len
targets. So the last token of a sequence is the first input of the next, and every token but the first is a target once.
Nothing is stored. The tokens after the last whole sequence are left out.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.pack.rows import Filled, Pieces
from smalti.data.sources.source import Int64s, Source

IGNORE = -100
"""A target that does not count."""

Int32s = npt.NDArray[np.int32]


def n_sequences(n_tokens: int, seq_len: int) -> int:
    """Whole sequences of ``seq_len`` inputs and targets in ``n_tokens`` tokens."""
    return max(0, (n_tokens - 1) // seq_len)


class Chopped:
    """The sequences of a source, chopped; see ``pack.rows``."""

    def __init__(self, source: Source, seq_len: int) -> None:
        self.source, self.seq_len = source, seq_len
        self.size = n_sequences(source.n_tokens, seq_len)

    def close(self) -> None:
        """Nothing but the source is open."""

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> Filled:
        """Fill ``out`` [n, L+1]."""
        self.source.read_rows(indexes * self.seq_len, out)
        return Filled(None, None)

    def pieces(self, indexes: Int64s) -> Pieces:
        """Sequences [n] -> one piece each."""
        n = indexes.size
        row, column, length = np.arange(n), np.zeros(n, dtype=np.int64), np.full(n, self.seq_len)
        return Pieces(row, column, indexes * self.seq_len + 1, length)

    def holding(self, begin: int, end: int) -> Int64s:
        """Sequences whose targets include any of the tokens [begin, end)."""
        first, last = max(begin - 1, 0) // self.seq_len, -(-(end - 1) // self.seq_len)
        return np.arange(first, max(first, min(last, self.size)))


def split(
    rows_ST1: npt.NDArray[Any], eod_id: int, *, mask_documents: bool = True
) -> tuple[Int64s, Int64s, Int32s, Int32s]:
    """Rows [S, L+1] -> inputs [S, L], targets [S, L], positions [S, L], documents [S, L].

    A document begins at each end-of-document token, which closes one document and stands before the next: its position
    is 0, and ``documents`` counts on there (from 0, or 1 when a row opens with one). With ``mask_documents=False`` a
    row is one document: positions run from 0 to L-1.
    """
    inputs = np.ascontiguousarray(rows_ST1[:, :-1], dtype=np.int64)
    targets = np.ascontiguousarray(rows_ST1[:, 1:], dtype=np.int64)
    positions, documents = number((inputs == eod_id) & mask_documents)
    return inputs, targets, positions, documents


def number(begins_ST: npt.NDArray[np.bool_]) -> tuple[Int32s, Int32s]:
    """Where documents begin [S, L] -> positions inside them [S, L], their numbers inside the row [S, L]."""
    # documents are few beside tokens, so all but two repeats is done by document, not by token
    n_rows, seq_len = begins_ST.shape
    starts = segment_starts(begins_ST)
    counted = begins_ST.ravel()[starts]
    lengths = np.diff(starts, append=begins_ST.size)
    numbers = np.cumsum(counted)
    first_of_row = np.searchsorted(starts, np.arange(n_rows) * seq_len)
    before_row = numbers[first_of_row] - counted[first_of_row]
    documents = np.repeat((numbers - before_row[starts // seq_len]).astype(np.int32), lengths)
    positions = np.arange(begins_ST.size, dtype=np.int32) - np.repeat(starts.astype(np.int32), lengths)
    return positions.reshape(begins_ST.shape), documents.reshape(begins_ST.shape)


def segment_starts(begins_ST: npt.NDArray[np.bool_]) -> Int64s:
    """First token of each document, and of each row, counted over all rows [segments]."""
    begins = begins_ST.copy()
    begins[:, :1] = True
    return np.flatnonzero(begins)
