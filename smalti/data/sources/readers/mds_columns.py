"""The column of an MDS data set that holds tokens, and how its arrays are encoded.

``ndarray[:dtype[:shape]]``: what the encoding does not say stands before the values of each sample: one byte for the
dtype, one byte ``ndim << 2 | width`` (width of a dimension: 1, 2, 4, 8 bytes) and the dimensions. ``bytes``: values
alone. Pickles are refused.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.data.sources.readers.mds_index import Columns
from smalti.data.sources.source import Int64s

DTYPE_CODES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    64: "uint64",
    65: "int64",
}
"""Whole numbers; 18, 34 and 66 are floats."""

_FLOATS = {18: "float16", 34: "float32", 66: "float64"}


@dataclass(frozen=True)
class TokenColumn:
    """The column that holds the tokens."""

    name: str
    place: int
    """In the order of columns."""
    size: int | None
    """Bytes of its part of a sample; None: they vary."""
    dtype: "np.dtype[Any] | None"
    """None: each sample says it."""
    is_array: bool
    """False: plain bytes."""
    has_shape: bool
    """The encoding gives the shape."""

    @property
    def head_of_1d(self) -> int:
        """Bytes before the dimensions of a sample."""
        return int(self.dtype is None) + int(self.is_array and not self.has_shape)

    def array(self, data: memoryview, path: str, stored: "np.dtype[Any] | None" = None) -> tuple[int, npt.NDArray[Any]]:
        """Where the values of one sample's part begin, and the values; flat, rows after one another.

        Raises DataError for a part that is not such an array, or not of dtype ``stored``.
        """
        at, dtype, count = 0, self.dtype, -1
        if dtype is None:
            dtype, at = _dtype(data[0] if len(data) else -1, path), 1
        if stored is not None and dtype != stored:
            raise DataError(
                f"{path} holds {dtype} in column '{self.name}', the samples before {stored}",
                allowed="one dtype in a column",
                hint="write the column again with one, as MDSWriter's 'ndarray:uint16'",
            )
        if self.is_array and not self.has_shape:
            shape, at = _shape(data, at, path)
            count = prod(shape)
        left = len(data) - at
        if left % dtype.itemsize or (count >= 0 and count * dtype.itemsize != left):
            raise DataError(
                f"{path} has a sample whose column '{self.name}' holds {left:,} bytes of {dtype}, "
                f"{'not a whole number' if count < 0 else f'{count:,} numbers are said'}",
                hint="is dtype right? Else the shard is damaged: copy it again",
            )
        return at, np.frombuffer(data[at:], dtype)

    def counts_of_1d(self, sizes: Int64s, width: int) -> Int64s | None:
        """Values in parts of ``sizes`` bytes, each an array of one dimension; None where that cannot be."""
        if not self.is_array or self.has_shape:
            at = sizes - int(self.dtype is None)
            return at // width if not (at % width).any() and not (at < 0).any() else None
        counts = np.full(sizes.shape, -1, dtype=np.int64)
        low = 0  # a document may be empty
        for dimension in (1, 2, 4):
            high = 1 << (8 * dimension)
            left = sizes - self.head_of_1d - dimension
            fits = (left >= low * width) & (left < high * width) & (left % width == 0)
            counts[fits] = left[fits] // width
            low = high
        return counts if not (counts < 0).any() else None


def choose_column(columns: Columns, wanted: str | None, given: str | None, path: str) -> TokenColumn:
    """The column ``wanted``, or the only one that can hold tokens. ``given``: the dtype of plain bytes.

    Raises UserError or DataError where there is none, or more than one.
    """
    if wanted is not None:
        if wanted not in columns.names:
            raise UserError(f"{path} has no column '{wanted}'", allowed=", ".join(columns.names))
        return _column(columns, columns.names.index(wanted), given, path)
    fitting = [n for n in range(len(columns.names)) if _why_not(columns.encodings[n], given) == ""]
    named = ", ".join(f"{name} ({encoding})" for name, encoding in zip(columns.names, columns.encodings, strict=True))
    if len(fitting) != 1:
        raise UserError(
            f"{path} has {len(fitting) or 'no'} columns that can hold tokens: {named}",
            allowed="one column of an ndarray of whole numbers, or of bytes with dtype=int64 (or what they hold)",
            hint="name it: column=NAME" + ("" if given else "; plain bytes want dtype=int64 too"),
        )
    return _column(columns, fitting[0], given, path)


def _column(columns: Columns, place: int, given: str | None, path: str) -> TokenColumn:
    name, encoding, size = columns.names[place], columns.encodings[place], columns.sizes[place]
    why = _why_not(encoding, given)
    if why:
        raise UserError(f"column '{name}' of {path} {why}")
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":
        return TokenColumn(name, place, size, np.dtype(given).newbyteorder("<"), False, False)
    if given is not None:
        raise UserError(f"dtype={given} has no effect: the encoding of column '{name}' is {encoding}")
    dtype, _, shape = rest.partition(":")
    return TokenColumn(name, place, size, np.dtype(dtype).newbyteorder("<") if dtype else None, True, bool(shape))


def _why_not(encoding: str, given: str | None) -> str:
    """Why a column of this encoding cannot hold tokens; empty when it can."""
    kind, _, rest = encoding.partition(":")
    if kind == "pkl":
        return "is pickled (pkl): reading it could run foreign code, so it is refused"
    if kind == "bytes":
        return "" if given else "is plain bytes: say what they hold with dtype=int64 (or int32, uint16 ...)"
    if kind != "ndarray":
        return f"is encoded as '{encoding}': not an array of tokens"
    dtype = rest.partition(":")[0]
    if dtype and dtype not in DTYPE_CODES.values():
        return f"is encoded as '{encoding}': not whole numbers"
    if not re.fullmatch(r"(\w+(:[1-9]\d{0,9}(,[1-9]\d{0,9})*)?)?", rest):
        return f"is encoded as '{encoding}', which no writer gives"
    return ""


def _dtype(code: int, path: str) -> "np.dtype[Any]":
    if code not in DTYPE_CODES:
        what = f"{_FLOATS[code]}, not whole numbers" if code in _FLOATS else f"an array of unknown dtype ({code})"
        raise DataError(f"{path} holds {what}", hint="is this the column of tokens? Else copy the shard again")
    return np.dtype(DTYPE_CODES[code]).newbyteorder("<")


def _shape(data: memoryview, at: int, path: str) -> tuple[list[int], int]:
    if len(data) <= at:
        raise DataError(f"{path} has a sample that ends before its shape", hint="copy the shard again")
    n_dims, width = data[at] >> 2, 1 << (data[at] & 3)
    end = at + 1 + n_dims * width
    if n_dims < 1 or len(data) < end:
        raise DataError(f"{path} has an array of {n_dims} dimensions in {len(data)} bytes", hint="copy the shard again")
    return np.frombuffer(data[at + 1 : end], f"<u{width}").tolist(), end
