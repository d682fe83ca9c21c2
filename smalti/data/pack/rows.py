"""The interface ``Sequences`` of both packing methods, and the types that describe rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from smalti.data.sources.source import Int64s


class Pieces(NamedTuple):
    """Ranges of tokens of a source that are the targets of rows."""

    row: Int64s
    """[m] index among the requested rows, ascending."""
    column: Int64s
    """[m] first target column; the piece fills [column, column + length)."""
    begin: Int64s
    """[m] the token of the source that is the first target; its input is the token before."""
    length: Int64s
    """[m] number of targets."""


class Joints(NamedTuple):
    """The places in rows where a piece or padding begins: the input there is not the preceding target."""

    row: Int64s
    """[m] index of the row."""
    column: Int64s
    """[m] column of the input."""
    token: Int64s
    """[m] the input."""

    @classmethod
    def concatenate(cls, parts: Sequence["Joints"]) -> "Joints":
        """Concatenate joints of different rows."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def slice_rows(self, begin: int, end: int) -> "Joints":
        """Return the joints of rows [begin, end), with rows counted from ``begin``."""
        mask = (self.row >= begin) & (self.row < end)
        return Joints(self.row[mask] - begin, self.column[mask], self.token[mask])


class RowInfo(NamedTuple):
    """The joints and the masked targets of rows."""

    joints: Joints | None
    """None: each row is one range of the source; a document begins where the previous one is closed."""
    masked: npt.NDArray[np.bool_] | None
    """[n, L] targets that do not count; None: all count."""
    values: Mapping[str, npt.NDArray[np.float32]] = {}
    """Name -> a number for each document of each row [n, most documents of a row], of examples; else empty."""


class Sequences(Protocol):
    """The sequences of one source at one sequence length."""

    seq_len: int
    size: int
    """Number of sequences in an epoch."""

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> RowInfo:
        """Fill ``out`` [n, L+1] of the source's dtype with the sequences of these indexes [n]."""

    def pieces(self, indexes: Int64s) -> Pieces:
        """Return the pieces of sequences [n], without reading a token."""

    def holding(self, begin: int, end: int) -> Int64s:
        """Return the sequences whose targets include any of the tokens [begin, end), in ascending order."""

    def close(self) -> None:
        """Release files, except those of the source; they are opened again by the next read."""
