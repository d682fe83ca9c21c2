"""Rows of examples: each is filled with whole examples by best fit; both sequences of a pair are in one row.

A sequence of n tokens takes n - 1 columns: its first token is an input only. The padding at the end of a row is not in
the loss. The rows are computed when the source is opened; nothing is stored.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.data.examples.source import ExampleSource
from smalti.data.pack.best_fit import assign
from smalti.data.pack.rows import Joints, Pieces, RowInfo
from smalti.data.sources.source import Int64s


class ExampleRows:
    """The rows of a folder of examples at one length; implements ``pack.rows.Sequences``."""

    def __init__(self, source: ExampleSource, seq_len: int, pad_id: int) -> None:
        """Raises DataError if an example does not fit into a row."""
        self.source = source
        self.seq_len = seq_len
        self.pad_id = pad_id
        first, ends = source.array("first"), np.asarray(source.array("ends"))
        self._begins = np.concatenate([[0], ends[:-1]])
        # targets before each sequence, and after the last
        before = np.concatenate([[0], np.cumsum(ends - self._begins - 1)])
        lengths = before[first[1:]] - before[first[:-1]]
        if source.record.longest > seq_len:
            n_long = int((lengths > seq_len).sum())
            raise DataError(
                f"{n_long:,} of {lengths.size:,} examples of {source.where} are longer than a row: {lengths.max():,} "
                f"targets, data.seq_len={seq_len}",
                allowed="examples that fit into a row",
                hint=f"data.seq_len={lengths.max()}, or truncate or drop long examples when they are tokenized",
            )
        row_of, self.size = assign(lengths.astype(np.uint32), seq_len)
        by_row = np.argsort(row_of, kind="stable")
        counts = first[by_row + 1] - first[by_row]
        offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        self._sequence = np.repeat(first[by_row], counts) + offset
        """Sequences by row, in a row in the order of the folder."""
        sequences_of_row = np.bincount(row_of[by_row], weights=counts, minlength=self.size).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sequences_of_row)])

    def pieces(self, indexes: Int64s) -> Pieces:
        """Return the pieces of rows [n], one for each sequence."""
        row, sequence = self._sequences_of(indexes)
        begins, length = self._begins[sequence], self.source.array("ends")[sequence] - self._begins[sequence] - 1
        before = np.cumsum(length) - length
        first = np.searchsorted(row, np.arange(indexes.size))
        return Pieces(row, before - before[first][row], begins + 1, length)

    def holding(self, begin: int, end: int) -> Int64s:
        """Return the rows whose targets include any of the tokens [begin, end)."""
        ends = self.source.array("ends")
        sequences = np.arange(
            np.searchsorted(ends, begin, side="right"), np.searchsorted(self._begins + 1, end, side="left")
        )
        at = np.flatnonzero(np.isin(self._sequence, sequences))
        return np.unique(np.searchsorted(self._starts, at, side="right") - 1)

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> RowInfo:
        """Fill ``out`` [n, L+1]; targets start at column 1."""
        pieces = self.pieces(indexes)
        tokens, in_loss = self.source.array("tokens"), self.source.array("in_loss")
        out[:] = self.pad_id
        masked = np.ones((indexes.size, self.seq_len), dtype=bool)
        for row, column, begin, length in zip(*(part.tolist() for part in pieces), strict=True):
            out[row, column + 1 : column + 1 + length] = tokens[begin : begin + length]
            masked[row, column : column + length] = ~in_loss[begin : begin + length]
        joints = Joints(pieces.row, pieces.column, tokens[pieces.begin - 1].astype(np.int64))
        out[pieces.row[pieces.column == 0], 0] = joints.token[pieces.column == 0]
        used = np.bincount(pieces.row, weights=pieces.length, minlength=indexes.size).astype(np.int64)
        short = np.flatnonzero(used < self.seq_len)
        padding = Joints(short, used[short], np.full(short.size, self.pad_id))
        return RowInfo(Joints.concatenate([joints, padding]), masked, self._values(indexes))

    def close(self) -> None:
        """Release nothing: the source holds the maps."""

    def _sequences_of(self, indexes: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each sequence of rows [n] the index of its row in ``indexes`` [m], and its number [m]."""
        counts = self._starts[indexes + 1] - self._starts[indexes]
        row = np.repeat(np.arange(indexes.size), counts)
        at = (
            np.arange(row.size)
            - np.repeat(np.cumsum(counts) - counts, counts)
            + np.repeat(self._starts[indexes], counts)
        )
        return row, self._sequence[at]

    def _values(self, indexes: Int64s) -> dict[str, npt.NDArray[np.float32]]:
        """Return column -> values [n, most sequences of a row], 0 where a row has fewer."""
        columns = self.source.record.columns
        if not columns:
            return {}
        row, sequence = self._sequences_of(indexes)
        place = np.arange(row.size) - np.searchsorted(row, row)
        table = self.source.array("values")[sequence]
        values = np.zeros((len(columns), indexes.size, int(place.max()) + 1), dtype=np.float32)
        values[:, row, place] = table.T
        return dict(zip(columns, values, strict=True))
