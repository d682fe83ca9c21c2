"""What rows are made of, however they are packed: the words that both ways of packing share."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from smalti.data.sources.source import Int64s


class Pieces(NamedTuple):
    """Stretches of a source whose tokens are targets: those of target columns [column, column + length) of a row."""

    row: Int64s
    """[m] place among the rows asked for, rising"""
    column: Int64s
    """[m]"""
    begin: Int64s
    """[m] first target, as a token of the source; its input is the token before."""
    length: Int64s
    """[m]"""


class Joints(NamedTuple):
    """Where the pieces and the padding of rows begin: the input there is not the target before it."""

    row: Int64s
    """[m]"""
    column: Int64s
    """[m]"""
    token: Int64s
    """[m] the input."""

    @classmethod
    def of(cls, parts: Sequence["Joints"]) -> "Joints":
        """All of them, one after another."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def among(self, begin: int, end: int) -> "Joints":
        """Those of rows [begin, end), counted from there."""
        mask = (self.row >= begin) & (self.row < end)
        return Joints(self.row[mask] - begin, self.column[mask], self.token[mask])


class Filled(NamedTuple):
    """What is to be known of rows beside their tokens."""

    joints: Joints | None
    """None: rows are stretches of the source; a document begins where the one before is closed."""
    masked: npt.NDArray[np.bool_] | None
    """[n, L] targets that do not count; None: all count."""


class Sequences(Protocol):
    """The sequences of one source at one sequence length."""

    seq_len: int
    size: int
    """How many there are: an epoch."""

    def read(self, indexes: Int64s, out: npt.NDArray[Any]) -> Filled:
        """Fill ``out`` [n, L+1] of the source's dtype with the sequences of these indexes [n]."""

    def pieces(self, indexes: Int64s) -> Pieces:
        """Sequences [n] -> their pieces, without reading a token."""

    def holding(self, begin: int, end: int) -> Int64s:
        """Indexes of the sequences whose targets include any of the tokens [begin, end), rising."""

    def close(self) -> None:
        """Let go of files, but not of the source; they open again when read."""
