"""Reads sequences of whole documents through the best-fit index.

A row is a concatenation of pieces of the corpus. The first input of a piece is the token before it in the corpus: the
end-of-document token of the previous document, or the last token of the previous piece of a document that was cut (as
in concatenate-and-chop). Then each token of the piece is a target once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.data.pack.index import PackIndex
from smalti.data.pack.rows import Joints, Pieces, RowInfo
from smalti.data.sources.source import Int64s, Source

_MIN_READ_TOKENS = 256


class Packed:
    """The packed sequences of a source; implements ``pack.rows.Sequences``."""

    def __init__(self, source: Source, index: PackIndex, pad_id: int) -> None:
        """``pad_id``: the token of padding, and the first input if a row begins with the first token of the source."""
        self.source = source
        self.index = index
        self.pad_id = pad_id
        self.seq_len = index.seq_len
        self.size = index.n_rows

    def pieces(self, indexes: Int64s) -> Pieces:
        """Return the pieces of sequences [n]."""
        row, begins, lengths = self.index.pieces(indexes)
        first = np.searchsorted(row, np.arange(indexes.size))
        before = np.cumsum(lengths) - lengths
        return Pieces(row, before - before[first][row], begins, lengths)

    def holding(self, begin: int, end: int) -> Int64s:
        """Return the sequences whose targets include any of the tokens [begin, end)."""
        return self.index.rows_of(begin, end)

    def close(self) -> None:
        """Release the index."""
        self.index.close()

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> RowInfo:
        """Fill ``out`` [n, L+1]; targets start at column 1."""
        pieces = self.pieces(indexes)
        first = np.searchsorted(pieces.row, np.arange(indexes.size))
        used = np.add.reduceat(pieces.length, first)
        if used.max(initial=0) > self.seq_len:
            raise DataError(f"{self.index.folder} holds a sequence of more than {self.seq_len} tokens")
        token = self._read_pieces(pieces, out)
        out[:, 0] = token[first]
        short = np.flatnonzero(used < self.seq_len)
        for row, column in zip(short.tolist(), used[short].tolist(), strict=True):
            out[row, column + 1 :] = self.pad_id
        padding = Joints(short, used[short], np.full(short.size, self.pad_id))
        joints = Joints.concatenate([Joints(pieces.row, pieces.column, token), padding])
        return RowInfo(joints, np.arange(self.seq_len) >= used[:, None] if short.size else None)

    def _read_pieces(self, pieces: Pieces, out: npt.NDArray[Any]) -> Int64s:
        """Copy the pieces into their rows; returns the token before each [m]."""
        owner, columns, begins, lengths = pieces
        n_tokens = self.source.n_tokens
        token = np.full(owner.size, self.pad_id, dtype=np.int64)
        # A source reads rows of equal length: pieces of similar length are read together, with the tokens after them.
        widths = np.maximum(_MIN_READ_TOKENS, 1 << np.frexp(lengths.astype(np.float64))[1].astype(np.int64))
        widths = np.minimum(widths, min(self.seq_len + 1, n_tokens))
        for width in sorted(set(widths.tolist())):
            which = np.flatnonzero(widths == width)
            start = np.clip(begins[which] - 1, 0, n_tokens - width)
            read = np.empty((which.size, width), dtype=out.dtype)
            self.source.read_rows(start, read)
            skip = begins[which] - start
            inside = skip > 0
            token[which[inside]] = read[inside, skip[inside] - 1]
            to = columns[which] + 1
            for data, row, a, b, n in zip(
                read, owner[which].tolist(), skip.tolist(), to.tolist(), lengths[which].tolist(), strict=True
            ):
                out[row, b : b + n] = data[a : a + n]
        return token
