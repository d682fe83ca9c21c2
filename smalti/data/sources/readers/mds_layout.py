"""Where the tokens of an MDS shard lie: by arithmetic where samples are all alike, else by the table of its offsets.

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

_KEPT_TABLES = 64
_DAMAGED = "the shard is damaged: copy it again"
_UNLIKE = (
    "arrays that mix dtypes or dimensions are not read: write the column again with one, as MDSWriter's "
    "'ndarray:uint16'; where it has one, the shard is damaged: copy it again"
)


class StridedLayout:
    """Samples of one size, each with ``count`` tokens ``at`` bytes behind its beginning. Of most shards only the size
    said so at opening: one whose samples turn out to have other sizes is read by its table."""

    def __init__(
        self,
        stored: "np.dtype[Any]",
        starts: Sequence[int],
        *,
        stride: int,
        at: int,
        count: int,
        fixed: Sequence[tuple[int, bytes]],
        varied: "VariedLayout",
    ) -> None:
        """``starts``: the first sample of each shard; ``fixed``: bytes that every such sample has, and where;
        ``varied``: reads shards whose samples have others."""
        self.stored, self._starts, self._stride, self._at, self._count = stored, starts, stride, at, count
        self._fixed = [(place, np.frombuffer(data, np.uint8)) for place, data in fixed]
        self._varied, self._others = varied, set[int]()

    def prepare(self, shards: Sequence[int]) -> None:
        """Nothing is needed."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Whole samples; nothing of a shard that is read by its table."""
        start, count = self._starts[piece.shard], self._count
        if piece.shard in self._others:
            return start, start
        return start + piece.begin // count * self._stride, start + -(-piece.end // count) * self._stride

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """Cut out of the samples, whose sizes are checked."""
        samples = np.frombuffer(data, np.uint8).reshape(-1, self._stride)
        fits = all((samples[:, place : place + one.size] == one).all() for place, one in self._fixed)
        if not fits or piece.shard in self._others:
            self._others.add(piece.shard)
            return self._varied.read(piece)
        n_bytes = self._count * self.stored.itemsize
        tokens = np.ascontiguousarray(samples[:, self._at : self._at + n_bytes]).view(self.stored).reshape(-1)
        first = piece.begin // self._count * self._count
        return tokens[piece.begin - first : piece.end - first]


@dataclass(frozen=True)
class SampleTable:
    """Samples of one shard."""

    offsets: Int64s
    """[n + 1] where they begin and end."""
    parts: Int64s
    """[n] where the column of tokens begins."""
    sizes: Int64s
    """[n] its bytes."""
    ends: Int64s
    """[n] tokens of all samples up to and with this one."""

    @property
    def n_tokens(self) -> int:
        """Of the shard."""
        return int(self.ends[-1]) if self.ends.size else 0


class SampleTables:
    """Reads the tables of shards, together; where several columns vary, the shards with them."""

    def __init__(self, index: MdsIndex, column: TokenColumn, stored: StoredShards, dims: int) -> None:
        """``dims``: of the arrays."""
        self._index, self._column, self.stored, self._dims = index, column, stored, dims
        simple: tuple[list[int], list[int]] = ([], [column.place])
        self.needs_whole = dims != 1 or any(one.varying() not in simple for one in index.shards)

    def read(self, shards: Sequence[int], dtype: "np.dtype[Any]") -> list[SampleTable]:
        """Tables of ``shards``. Raises DataError for one that contradicts itself or the index."""
        entries = [self._index.shards[n] for n in shards]
        ends = [one.shard.raw.n_bytes if self.needs_whole else 4 * (one.samples + 2) for one in entries]
        found = self.stored.read([(n, 0, end) for n, end in zip(shards, ends, strict=True)])
        return [self._table(n, data, dtype) for n, data in zip(shards, found, strict=True)]

    def _table(self, shard: int, data: memoryview, dtype: "np.dtype[Any]") -> SampleTable:
        entry, path = self._index.shards[shard], self.stored.path(shard)
        n, column, varying = entry.samples, self._column, entry.varying()
        head = np.frombuffer(data, "<u4", count=n + 2)
        offsets = head[1:].astype(np.int64)
        wrong = int(head[0]) != n or int(offsets[0]) < 4 * (n + 2) or int(offsets[-1]) != entry.shard.raw.n_bytes
        if wrong or (np.diff(offsets) < 0).any():
            raise DataError(f"the table of samples in {path} does not fit its index ({n:,} samples)", hint=_DAMAGED)
        known = [size if size is not None else 0 for size in entry.sizes]
        parts = offsets[:-1] + 4 * len(varying)
        if not self.needs_whole:
            sizes = np.diff(offsets) - 4 * len(varying) - (sum(known) - known[column.place])
            parts = parts + sum(known[: column.place])
        else:
            said = _said_sizes(data, offsets[:-1], 4 * len(varying), path)
            all_sizes = [said[:, varying.index(k)] if k in varying else known[k] for k in range(len(known))]
            sizes = np.zeros(n, dtype=np.int64) + all_sizes[column.place]
            parts = parts + sum(all_sizes[: column.place])
            wrong = bool((offsets[:-1] + 4 * len(varying) + sum(all_sizes) != offsets[1:]).any())
        if wrong or (sizes < 0).any():
            raise DataError(f"{path} has a sample whose columns do not fill it", hint=_DAMAGED)
        counts = column.counts_of_1d(sizes, dtype.itemsize) if self._dims == 1 else None
        if counts is None:
            if not self.needs_whole:
                raise DataError(f"{path} has a sample whose size fits no array of {dtype}", hint=_UNLIKE)
            each = zip(parts.tolist(), sizes.tolist(), strict=True)
            counts = np.array([column.array(data[a : a + size], path, dtype)[1].size for a, size in each], np.int64)
        return SampleTable(offsets, parts, sizes, np.cumsum(counts, dtype=np.int64))


def _said_sizes(data: memoryview, begins: Int64s, width: int, path: str) -> Int64s:
    """What the first ``width`` bytes of each sample say of the sizes of its columns, [n, varying columns]."""
    raw = np.frombuffer(data, np.uint8)
    if begins.size and int(begins.max()) + width > raw.size:
        raise DataError(f"{path} has a sample that ends before its sizes", hint=_DAMAGED)
    heads = raw[begins[:, None] + np.arange(width)]
    sizes: Int64s = np.ascontiguousarray(heads).view("<u4").astype(np.int64)
    return sizes


class VariedLayout:
    """Samples of different sizes: their table is read with the first row of a shard, and some tables are kept."""

    def __init__(
        self,
        stored: "np.dtype[Any]",
        column: TokenColumn,
        tables: SampleTables,
        shard_tokens: Int64s,
        path: Callable[[int], str],
    ) -> None:
        self.stored = stored
        self._column, self._tables, self._shard_tokens, self._path = column, tables, shard_tokens, path
        self._kept: OrderedDict[int, SampleTable] = OrderedDict()
        self._lock = threading.Lock()
        self._in_use = threading.local()

    def prepare(self, shards: Sequence[int]) -> None:
        """Read the tables that are not there."""
        wanted = sorted(set(shards))
        with self._lock:
            tables = {shard: self._kept[shard] for shard in wanted if shard in self._kept}
        missing = [shard for shard in wanted if shard not in tables]
        if missing:
            tables.update(zip(missing, self._tables.read(missing, self.stored), strict=True))
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
                self._kept[shard] = tables[shard]
                self._kept.move_to_end(shard)
            while len(self._kept) > _KEPT_TABLES:
                self._kept.popitem(last=False)

    def read(self, piece: Piece) -> npt.NDArray[Any]:
        """The tokens of ``piece``, of a shard that nothing was prepared for."""
        self.prepare([piece.shard])
        return self.values(piece, self._tables.stored.read([(piece.shard, *self.span(piece))])[0])

    def ends(self, shard: int) -> Int64s:
        """Where the samples of a shard end, in its tokens."""
        self.prepare([shard])
        return self._table(shard).ends

    def span(self, piece: Piece) -> tuple[int, int]:
        """Whole samples."""
        table = self._table(piece.shard)
        first, last = self._samples(table, piece)
        return int(table.offsets[first]), int(table.offsets[last])

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """Array by array; each must be what the table made of it."""
        table, path = self._table(piece.shard), self._path(piece.shard)
        first, last = self._samples(table, piece)
        start, found = int(table.offsets[first]), []
        for sample in range(first, last):
            part = int(table.parts[sample]) - start
            values = self._column.array(data[part : part + int(table.sizes[sample])], path, self.stored)[1]
            before = int(table.ends[sample - 1]) if sample else 0
            if values.size != int(table.ends[sample]) - before:
                raise DataError(f"sample {sample:,} of {path} is not as long as its size says", hint=_UNLIKE)
            found.append(values)
        before = int(table.ends[first - 1]) if first else 0
        return np.concatenate(found)[piece.begin - before : piece.end - before]

    def _table(self, shard: int) -> SampleTable:
        tables: dict[int, SampleTable] = self._in_use.tables  # of this thread: another may push it out of what is kept
        return tables[shard]

    @staticmethod
    def _samples(table: SampleTable, piece: Piece) -> tuple[int, int]:
        first = int(np.searchsorted(table.ends, piece.begin, side="right"))
        last = int(np.searchsorted(table.ends, piece.end, side="left")) + 1
        return first, last
