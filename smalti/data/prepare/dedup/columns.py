"""Converts between the columns of Daft's functions and arrays."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.prepare.dedup.shingles import MAX_ROWS

NONE = np.empty(0, np.int64)

_CALL_BYTES = 8 << 20


def hashes_of_bands(values: Any, n_bands: int, n_rows: int) -> list[Any]:
    """Return the order and the hash of each band, for signatures with ``n_bands * n_rows`` values a row."""
    values = values.astype(np.uint64)
    with np.errstate(over="ignore"):
        # These two values decide the neighbours in a large bucket.
        columns = [(values[:, 0] << np.uint64(31)) ^ values[:, -1]]
        for band in range(n_bands):
            mixed = np.full(len(values), band + 1, np.uint64)
            for row in range(n_rows):
                mixed = (mixed ^ values[:, band * n_rows + row]) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
            columns.append(mixed)
    return columns


def bools(column: Any) -> Any:
    """A column of booleans as a numpy array."""
    return np.asarray(column.to_arrow().to_numpy(zero_copy_only=False))


def rows_of(column: Any) -> list[Any]:
    """The rows of a column of lists as numpy arrays."""
    return rows_of_lists(column.to_arrow())


def rows_of_lists(lists: pa.LargeListArray) -> list[Any]:
    """The rows of an array of lists as numpy arrays."""
    values, offsets = np.asarray(lists.values), np.asarray(lists.offsets)
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def as_lists(rows: Sequence[Any]) -> pa.LargeListArray:
    """Lists of int64, one for each numpy array."""
    offsets = np.cumsum([0, *map(len, rows)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(np.concatenate([NONE, *rows])))


def pieces(texts: pa.Array) -> list[pa.Array]:
    """Slice ``texts`` by at most MAX_ROWS rows and _CALL_BYTES bytes (a longer text is alone); at least one slice."""
    ends = np.concatenate([[0], np.cumsum(np.asarray(pc.binary_length(texts)))])
    slices = []
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(ends, ends[start] + _CALL_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), start + MAX_ROWS, len(texts))
        slices.append(texts.slice(start, stop - start))
        start = stop
    return slices or [texts]
