"""Sequences of whole documents, read through the best-fit index.

A row holds pieces of the corpus one after another. The first input of a piece is the token that stands before it in
the corpus: the end-of-document token that closes the document before, or, for the rest of a document that was chopped,
that document's own last token (as in concatenate-and-chop). Then each token of the piece is a target once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.data.pack.index import PackIndex
from smalti.data.pack.rows import Filled, Joints, Pieces
from smalti.data.sources.source import Int64s, Source

_LEAST_TOKENS = 256


class Packed:
    """The sequences of a source, packed; see ``pack.rows``."""

    def __init__(self, source: Source, index: PackIndex, fill_id: int) -> None:
        """``fill_id``: stands where a row has no token left, and before the very first token of the source."""
        self.source, self.index, self.fill_id = source, index, fill_id
        self.seq_len, self.size = index.seq_len, index.n_rows

    def pieces(self, indexes: Int64s) -> Pieces:
        """Sequences [n] -> their pieces."""
        row, begins, lengths = self.index.pieces(indexes)
        first = np.searchsorted(row, np.arange(indexes.size))
        before = np.cumsum(lengths) - lengths
        return Pieces(row, before - before[first][row], begins, lengths)

    def holding(self, begin: int, end: int) -> Int64s:
        """Sequences whose targets include any of the tokens [begin, end)."""
        return self.index.rows_of(begin, end)

    def close(self) -> None:
        """Let go of the index."""
        self.index.close()

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> Filled:
        """Fill ``out`` [n, L+1], targets from column 1 on."""
        pieces = self.pieces(indexes)
        first = np.searchsorted(pieces.row, np.arange(indexes.size))
        used = np.add.reduceat(pieces.length, first)
        if used.max(initial=0) > self.seq_len:
            raise DataError(f"{self.index.folder} holds a sequence of more than {self.seq_len} tokens")
        token = self._read_pieces(pieces, out)
        out[:, 0] = token[first]
        short = np.flatnonzero(used < self.seq_len)
        for row, column in zip(short.tolist(), used[short].tolist(), strict=True):
            out[row, column + 1 :] = self.fill_id
        padding = Joints(short, used[short], np.full(short.size, self.fill_id))
        joints = Joints.of([Joints(pieces.row, pieces.column, token), padding])
        return Filled(joints, np.arange(self.seq_len) >= used[:, None] if short.size else None)

    def _read_pieces(self, pieces: Pieces, out: npt.NDArray[Any]) -> Int64s:
        """Put the pieces into their rows; returns the token before each [m]."""
        owner, columns, begins, lengths = pieces
        n_tokens = self.source.n_tokens
        token = np.full(owner.size, self.fill_id, dtype=np.int64)
        # a source reads rows of one length, so pieces of about one length are read together, with what follows them
        widths = np.maximum(_LEAST_TOKENS, 1 << np.frexp(lengths.astype(np.float64))[1].astype(np.int64))
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
