"""Concatenate-and-chop: cuts sequences from the tokens of a source when they are read.

Sequence i of a source is tokens [i * seq_len, i * seq_len + seq_len + 1): seq_len inputs and, shifted by one, seq_len
targets. So the last token of a sequence is the first input of the next, and every token but the first is a target once.
Nothing is stored. The tokens after the last whole sequence are not used.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.pack.rows import Pieces, RowInfo
from smalti.data.sources.source import Int64s, Source

IGNORE = -100
"""The value of a target that does not count in the loss."""

Int32s = npt.NDArray[np.int32]


def n_sequences(n_tokens: int, seq_len: int) -> int:
    """Return the number of whole sequences of ``seq_len`` inputs and targets in ``n_tokens`` tokens."""
    return max(0, (n_tokens - 1) // seq_len)


class Chopped:
    """The sequences of a source by concatenate-and-chop; implements ``pack.rows.Sequences``."""

    def __init__(self, source: Source, seq_len: int) -> None:
        self.source = source
        self.seq_len = seq_len
        self.size = n_sequences(source.n_tokens, seq_len)

    def close(self) -> None:
        """Do nothing: no file is open except the source."""

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> RowInfo:
        """Fill ``out`` [n, L+1]."""
        self.source.read_rows(indexes * self.seq_len, out)
        return RowInfo(None, None)

    def pieces(self, indexes: Int64s) -> Pieces:
        """Return the pieces of sequences [n]: one for each."""
        n = indexes.size
        columns = np.zeros(n, dtype=np.int64)
        return Pieces(np.arange(n), columns, indexes * self.seq_len + 1, np.full(n, self.seq_len))

    def holding(self, begin: int, end: int) -> Int64s:
        """Return the sequences whose targets include any of the tokens [begin, end)."""
        first = max(begin - 1, 0) // self.seq_len
        last = -(-(end - 1) // self.seq_len)
        return np.arange(first, max(first, min(last, self.size)))


def split(
    rows_ST1: npt.NDArray[Any], eod_id: int, *, mask_documents: bool = True
) -> tuple[Int64s, Int64s, Int32s, Int32s]:
    """Split rows [S, L+1] into inputs, targets, positions and documents, each [S, L].

    A document begins at each end-of-document token, which closes one document and precedes the next: its position is 0,
    and ``documents`` increases there (from 0, or 1 if a row begins with one). With ``mask_documents=False`` a row is
    one document: positions run from 0 to L-1.
    """
    inputs = np.ascontiguousarray(rows_ST1[:, :-1], dtype=np.int64)
    targets = np.ascontiguousarray(rows_ST1[:, 1:], dtype=np.int64)
    positions, documents = number((inputs == eod_id) & mask_documents)
    return inputs, targets, positions, documents


def number(begins_ST: npt.NDArray[np.bool_]) -> tuple[Int32s, Int32s]:
    """Return the position in its document [S, L], and the number of its document in the row [S, L], of each token.

    ``begins_ST``: whether a document begins at the token.
    """
    # Everything but two repeats is done per document, because there are far fewer documents than tokens.
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
    """Return the first token of each document and of each row, as indexes into the flattened rows [segments]."""
    begins = begins_ST.copy()
    begins[:, :1] = True
    return np.flatnonzero(begins)
