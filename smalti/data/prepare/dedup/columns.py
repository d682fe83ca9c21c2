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


def bools(column: Any) -> Any:
    """Return a column of booleans as a numpy array."""
    return np.asarray(column.to_arrow().to_numpy(zero_copy_only=False))


def rows_of(column: Any) -> list[Any]:
    """Return the rows of a column of lists as numpy arrays."""
    return rows_of_lists(column.to_arrow())


def rows_of_lists(lists: pa.LargeListArray) -> list[Any]:
    """Return the rows of an array of lists as numpy arrays."""
    values = np.asarray(lists.values)
    offsets = np.asarray(lists.offsets)
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def as_lists(rows: Sequence[Any]) -> pa.LargeListArray:
    """Return an array of lists of int64, one for each numpy array."""
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
