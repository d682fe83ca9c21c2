"""Layouts of MDS shards: locates tokens by arithmetic if samples have one size, else by the table of sample offsets.

A shard: u32 n, u32 offsets[n + 1] from the beginning of the file, a copy of its config, then the samples. A sample: a
u32 for each column whose size varies, then the columns. Everything is little-endian.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.data.sources.readers.mds_columns import TokenColumn
from smalti.data.sources.readers.mds_index import MdsIndex
from smalti.data.sources.readers.sharded_source import Piece
from smalti.data.sources.readers.shards import StoredShards
from smalti.data.sources.source import Int64s

_CACHED_TABLES = 64
_DAMAGED = "the shard is damaged: copy it again"
_MIXED_HINT = (
    "arrays that mix dtypes or dimensions are not read: write the column again with one, as MDSWriter's "
    "'ndarray:uint16'; if it already has one, the shard is damaged: copy it again"
)


class StridedLayout:
    """Layout of samples of one size, with ``count`` tokens each, ``at`` bytes after the beginning of the sample.

    At opening this was inferred from the sizes of most shards; a shard whose samples turn out to differ is read by its
    table instead.
    """

    def __init__(
        self,
        dtype: "np.dtype[Any]",
        starts: Sequence[int],
        *,
        stride: int,
        at: int,
        count: int,
        fixed: Sequence[tuple[int, bytes]],
        varied: "VariedLayout",
    ) -> None:
        """``starts``: first byte of the samples of each shard; ``fixed``: (offset, bytes) that all such samples share;
        ``varied``: reads the shards whose samples differ."""
        self.dtype = dtype
        self._starts = starts
        self._stride = stride
        self._at = at
        self._count = count
        self._fixed = [(offset, np.frombuffer(data, np.uint8)) for offset, data in fixed]
        self._varied = varied
        self._varied_shards = set[int]()

    def prepare(self, shards: Sequence[int]) -> None:
        """Do nothing: no metadata is needed."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Return the bytes of whole samples; an empty span for a shard that is read by its table."""
        start = self._starts[piece.shard]
        count = self._count
        if piece.shard in self._varied_shards:
            return start, start
        return start + piece.begin // count * self._stride, start + -(-piece.end // count) * self._stride

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """Extract the tokens from the samples, after a check that these have the expected size."""
        samples = np.frombuffer(data, np.uint8).reshape(-1, self._stride)
        matches = all((samples[:, offset : offset + part.size] == part).all() for offset, part in self._fixed)
        if not matches or piece.shard in self._varied_shards:
            self._varied_shards.add(piece.shard)
            return self._varied.read(piece)
        n_bytes = self._count * self.dtype.itemsize
        tokens = np.ascontiguousarray(samples[:, self._at : self._at + n_bytes]).view(self.dtype).reshape(-1)
        first = piece.begin // self._count * self._count
        return tokens[piece.begin - first : piece.end - first]


@dataclass(frozen=True)
class SampleTable:
    """The samples of one shard."""

    offsets: Int64s
    """[n + 1] first byte of each sample, and the end of the last."""
    parts: Int64s
    """[n] first byte of the token column."""
    sizes: Int64s
    """[n] bytes of the token column."""
    ends: Int64s
    """[n] number of tokens up to and including this sample."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the shard."""
        return int(self.ends[-1]) if self.ends.size else 0


class SampleTables:
    """Reads the tables of several shards at once; the whole shards if several columns vary in size."""

    def __init__(self, index: MdsIndex, column: TokenColumn, stored: StoredShards, dims: int) -> None:
        """``dims``: number of dimensions of the arrays."""
        self._index = index
        self._column = column
        self.stored = stored
        self._dims = dims
        simple: tuple[list[int], list[int]] = ([], [column.place])
        self.needs_whole = dims != 1 or any(entry.varying() not in simple for entry in index.shards)

    def read(self, shards: Sequence[int], dtype: "np.dtype[Any]") -> list[SampleTable]:
        """Read the tables of ``shards``. Raises DataError for a table that is inconsistent or contradicts the index."""
        entries = [self._index.shards[n] for n in shards]
        ends = [entry.shard.raw.n_bytes if self.needs_whole else 4 * (entry.samples + 2) for entry in entries]
        buffers = self.stored.read([(n, 0, end) for n, end in zip(shards, ends, strict=True)])
        return [self._table(n, data, dtype) for n, data in zip(shards, buffers, strict=True)]

    def _table(self, shard: int, data: memoryview, dtype: "np.dtype[Any]") -> SampleTable:
        entry = self._index.shards[shard]
        path = self.stored.path(shard)
        column = self._column
        n = entry.samples
        varying = entry.varying()
        head = np.frombuffer(data, "<u4", count=n + 2)
        offsets = head[1:].astype(np.int64)
        wrong = int(head[0]) != n or int(offsets[0]) < 4 * (n + 2) or int(offsets[-1]) != entry.shard.raw.n_bytes
        if wrong or (np.diff(offsets) < 0).any():
            raise DataError(f"the table of samples in {path} does not match its index ({n:,} samples)", hint=_DAMAGED)
        known = [size if size is not None else 0 for size in entry.sizes]
        parts = offsets[:-1] + 4 * len(varying)
        if not self.needs_whole:
            sizes = np.diff(offsets) - 4 * len(varying) - (sum(known) - known[column.place])
            parts = parts + sum(known[: column.place])
        else:
            read = _varying_sizes(data, offsets[:-1], 4 * len(varying), path)
            all_sizes = [read[:, varying.index(k)] if k in varying else known[k] for k in range(len(known))]
            sizes = np.zeros(n, dtype=np.int64) + all_sizes[column.place]
            parts = parts + sum(all_sizes[: column.place])
            wrong = bool((offsets[:-1] + 4 * len(varying) + sum(all_sizes) != offsets[1:]).any())
        if wrong or (sizes < 0).any():
            raise DataError(f"{path} has a sample whose columns do not fill it", hint=_DAMAGED)
        counts = column.counts_of_1d(sizes, dtype.itemsize) if self._dims == 1 else None
        if counts is None:
            if not self.needs_whole:
                raise DataError(f"{path} has a sample whose size fits no array of {dtype}", hint=_MIXED_HINT)
            each = zip(parts.tolist(), sizes.tolist(), strict=True)
            counts = np.array([column.array(data[a : a + size], path, dtype)[1].size for a, size in each], np.int64)
        return SampleTable(offsets, parts, sizes, np.cumsum(counts, dtype=np.int64))


def _varying_sizes(data: memoryview, begins: Int64s, width: int, path: str) -> Int64s:
    """Read the sizes of the varying columns, the first ``width`` bytes of each sample: [n, varying columns]."""
    raw = np.frombuffer(data, np.uint8)
    if begins.size and int(begins.max()) + width > raw.size:
        raise DataError(f"{path} has a sample that ends before its sizes", hint=_DAMAGED)
    heads = raw[begins[:, None] + np.arange(width)]
    sizes: Int64s = np.ascontiguousarray(heads).view("<u4").astype(np.int64)
    return sizes


class VariedLayout:
    """Layout of samples of different sizes: the table of a shard is read before its first row, and cached."""

    def __init__(
        self,
        dtype: "np.dtype[Any]",
        column: TokenColumn,
        tables: SampleTables,
        shard_tokens: Int64s,
        path: Callable[[int], str],
    ) -> None:
        self.dtype = dtype
        self._column = column
        self._tables = tables
        self._shard_tokens = shard_tokens
        self._path = path
        self._cache: OrderedDict[int, SampleTable] = OrderedDict()
        self._lock = threading.Lock()
        self._in_use = threading.local()

    def prepare(self, shards: Sequence[int]) -> None:
        """Read the tables that are not cached."""
        wanted = sorted(set(shards))
        with self._lock:
            tables = {shard: self._cache[shard] for shard in wanted if shard in self._cache}
        missing = [shard for shard in wanted if shard not in tables]
        if missing:
            tables.update(zip(missing, self._tables.read(missing, self.dtype), strict=True))
        for shard in missing:
            if tables[shard].n_tokens != int(self._shard_tokens[shard]):
                raise DataError(
                    f"{self._path(shard)} holds {tables[shard].n_tokens:,} tokens, "
                    f"{int(self._shard_tokens[shard]):,} when its data set was opened",
                    hint="it was changed, or is damaged: copy it again",
                )
        self._in_use.tables = tables
        with self._lock:
            for shard in wanted:
                self._cache[shard] = tables[shard]
                self._cache.move_to_end(shard)
            while len(self._cache) > _CACHED_TABLES:
                self._cache.popitem(last=False)

    def read(self, piece: Piece) -> npt.NDArray[Any]:
        """Read the tokens of ``piece`` without a call of ``prepare`` before."""
        self.prepare([piece.shard])
        return self.values(piece, self._tables.stored.read([(piece.shard, *self.span(piece))])[0])

    def ends(self, shard: int) -> Int64s:
        """Return where the samples of a shard end, in its tokens."""
        self.prepare([shard])
        return self._table(shard).ends

    def span(self, piece: Piece) -> tuple[int, int]:
        """Return the bytes of whole samples."""
        table = self._table(piece.shard)
        first, last = self._samples(table, piece)
        return int(table.offsets[first]), int(table.offsets[last])

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """Decode the samples one by one. Raises DataError if one has not the length that its size implies."""
        table = self._table(piece.shard)
        path = self._path(piece.shard)
        first, last = self._samples(table, piece)
        start = int(table.offsets[first])
        arrays = []
        for sample in range(first, last):
            part = int(table.parts[sample]) - start
            values = self._column.array(data[part : part + int(table.sizes[sample])], path, self.dtype)[1]
            before = int(table.ends[sample - 1]) if sample else 0
            if values.size != int(table.ends[sample]) - before:
                raise DataError(f"sample {sample:,} of {path} is not as long as its size implies", hint=_MIXED_HINT)
            arrays.append(values)
        before = int(table.ends[first - 1]) if first else 0
        return np.concatenate(arrays)[piece.begin - before : piece.end - before]

    def _table(self, shard: int) -> SampleTable:
        tables: dict[int, SampleTable] = self._in_use.tables  # per thread: another may evict the table from the cache
        return tables[shard]

    @staticmethod
    def _samples(table: SampleTable, piece: Piece) -> tuple[int, int]:
        first = int(np.searchsorted(table.ends, piece.begin, side="right"))
        last = int(np.searchsorted(table.ends, piece.end, side="left")) + 1
        return first, last
