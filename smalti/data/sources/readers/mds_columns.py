"""Chooses the token column of an MDS data set and decodes its arrays.

``ndarray[:dtype[:shape]]``: what the encoding does not give precedes the values of each sample: one byte for the dtype,
one byte ``ndim << 2 | width`` (width of a dimension: 1, 2, 4, 8 bytes) and the dimensions. ``bytes``: values alone.
Pickles are refused.
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
"""Codes of the integer dtypes; 18, 34 and 66 are floats."""

_FLOATS = {18: "float16", 34: "float32", 66: "float64"}


@dataclass(frozen=True)
class TokenColumn:
    """The column with the tokens."""

    name: str
    place: int
    """Index among the columns."""
    size: int | None
    """Bytes of the column in a sample; None: it varies."""
    dtype: "np.dtype[Any] | None"
    """None: each sample has its dtype."""
    is_array: bool
    """False: plain bytes."""
    has_shape: bool
    """Whether the encoding gives the shape."""

    @property
    def head_of_1d(self) -> int:
        """Bytes that precede the dimensions in a sample."""
        return int(self.dtype is None) + int(self.is_array and not self.has_shape)

    def array(
        self, data: memoryview, path: str, expected: "np.dtype[Any] | None" = None
    ) -> tuple[int, npt.NDArray[Any]]:
        """Decode the column of one sample: returns the offset of the values, and the values, flattened by rows.

        Raises DataError for data that is not such an array, or not of dtype ``expected``.
        """
        at = 0
        dtype = self.dtype
        count = -1
        if dtype is None:
            dtype = _dtype(data[0] if len(data) else -1, path)
            at = 1
        if expected is not None and dtype != expected:
            raise DataError(
                f"{path} holds {dtype} in column '{self.name}', earlier samples {expected}",
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
                f"{'not a whole number' if count < 0 else f'its header says {count:,} numbers'}",
                hint="is dtype right? Else the shard is damaged: copy it again",
            )
        return at, np.frombuffer(data[at:], dtype)

    def counts_of_1d(self, sizes: Int64s, width: int) -> Int64s | None:
        """Return the number of values in arrays of one dimension and ``sizes`` bytes; None if a size is impossible."""
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


def choose_column(columns: Columns, wanted: str | None, bytes_dtype: str | None, path: str) -> TokenColumn:
    """Return the column ``wanted``, or the only one that can hold tokens. ``bytes_dtype``: the dtype of plain bytes.

    Raises UserError or DataError if there is none, or more than one.
    """
    if wanted is not None:
        if wanted not in columns.names:
            raise UserError(f"{path} has no column '{wanted}'", allowed=", ".join(columns.names))
        return _column(columns, columns.names.index(wanted), bytes_dtype, path)
    candidates = [n for n in range(len(columns.names)) if _why_not(columns.encodings[n], bytes_dtype) == ""]
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in zip(columns.names, columns.encodings, strict=True))
    if len(candidates) != 1:
        raise UserError(
            f"{path} has {len(candidates) or 'no'} columns that can hold tokens: {shown}",
            allowed="one column of an ndarray of whole numbers, or of bytes with their dtype (dtype=int64)",
            hint="name it: column=NAME" + ("" if bytes_dtype else "; plain bytes also need dtype=int64"),
        )
    return _column(columns, candidates[0], bytes_dtype, path)


def _column(columns: Columns, place: int, bytes_dtype: str | None, path: str) -> TokenColumn:
    name = columns.names[place]
    encoding = columns.encodings[place]
    size = columns.sizes[place]
    why = _why_not(encoding, bytes_dtype)
    if why:
        raise UserError(f"column '{name}' of {path} {why}")
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":
        return TokenColumn(name, place, size, np.dtype(bytes_dtype).newbyteorder("<"), False, False)
    if bytes_dtype is not None:
        raise UserError(f"dtype={bytes_dtype} has no effect: the encoding of column '{name}' is {encoding}")
    dtype, _, shape = rest.partition(":")
    return TokenColumn(name, place, size, np.dtype(dtype).newbyteorder("<") if dtype else None, True, bool(shape))


def _why_not(encoding: str, bytes_dtype: str | None) -> str:
    """Return why a column of this encoding cannot hold tokens; empty if it can."""
    kind, _, rest = encoding.partition(":")
    if kind == "pkl":
        return "is pickled (pkl): reading it could run foreign code, so it is refused"
    if kind == "bytes":
        return "" if bytes_dtype else "is plain bytes: set their dtype, dtype=int64 (or int32, uint16 ...)"
    if kind != "ndarray":
        return f"is encoded as '{encoding}': not an array of tokens"
    dtype = rest.partition(":")[0]
    if dtype and dtype not in DTYPE_CODES.values():
        return f"is encoded as '{encoding}': not whole numbers"
    if not re.fullmatch(r"(\w+(:[1-9]\d{0,9}(,[1-9]\d{0,9})*)?)?", rest):
        return f"is encoded as '{encoding}', which is not a valid encoding"
    return ""


def _dtype(code: int, path: str) -> "np.dtype[Any]":
    if code not in DTYPE_CODES:
        what = f"{_FLOATS[code]}, not whole numbers" if code in _FLOATS else f"an array of unknown dtype ({code})"
        raise DataError(f"{path} holds {what}", hint="is this the column of tokens? Else copy the shard again")
    return np.dtype(DTYPE_CODES[code]).newbyteorder("<")


def _shape(data: memoryview, at: int, path: str) -> tuple[list[int], int]:
    if len(data) <= at:
        raise DataError(f"{path} has a sample that ends before its shape", hint="copy the shard again")
    n_dims = data[at] >> 2
    width = 1 << (data[at] & 3)
    end = at + 1 + n_dims * width
    if n_dims < 1 or len(data) < end:
        raise DataError(f"{path} has an array of {n_dims} dimensions in {len(data)} bytes", hint="copy the shard again")
    return np.frombuffer(data[at + 1 : end], f"<u{width}").tolist(), end
