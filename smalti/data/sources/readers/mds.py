"""Reads MDS data sets of mosaicml-streaming as StreamingDataset does, without its cache and without pickles.

Tokens are one column of every sample; samples and shards are in the order of the index. If all samples have one size,
tokens are located by arithmetic. Else each sample counts as a document, and the table of every shard is read once at
opening to count its tokens (the whole shard, if it is compressed or several columns vary).
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smalti.base import log, store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.base.units import format_bytes
from smalti.config.data import SourceConfig
from smalti.data.fetch import Files
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.readers.mds_columns import TokenColumn, choose_column
from smalti.data.sources.readers.mds_index import FILE_NAME, Columns, MdsIndex, parse_index
from smalti.data.sources.readers.mds_layout import SampleTable, SampleTables, StridedLayout, VariedLayout
from smalti.data.sources.readers.sharded_source import Facts, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredShards
from smalti.data.sources.source import Int64s

_AT_ONCE = 64
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class _Opened:
    """The parsed index, its token column and its shards, which ``read_index`` and ``open_source`` both need."""

    index: MdsIndex
    column: TokenColumn
    stored: StoredShards
    path: str

    @classmethod
    def of(cls, config: SourceConfig, data: bytes, files: Files) -> "_Opened":
        path = f"{files.where}/{FILE_NAME}"
        index = _prefer_decompressed(parse_index(data, path), files.where)
        column = choose_column(index.columns, config.column, config.dtype, path)
        return cls(index, column, StoredShards(files, [entry.shard for entry in index.shards]), path)


def read_index(folder: SourceFolder) -> Index:
    """Read index.json, and the size of the samples or the number of tokens of each shard, which it lacks."""
    data = folder.index_file
    opened = _Opened.of(folder.config, data, folder.files)
    column = opened.column
    parts = {FILE_NAME: data}
    facts: dict[str, Any] = {}
    if column.size is not None and column.dtype is not None:
        facts = {"dtype": column.dtype.name, "dims": 1}
        if None not in opened.index.columns.sizes:
            facts["alike"] = _fixed_size_by_index(opened.index.columns, column)
            _check_heads(opened, facts["alike"]["stride"])
    else:
        facts, tables = _first_samples(opened)
        if "alike" not in facts:
            parts["tokens"] = _count_tokens(opened, tables, np.dtype(facts["dtype"])).astype("<i8").tobytes()
    return Index("mds", facts, parts)


def open_source(folder: SourceFolder, index: Index) -> ShardedSource:
    """Open the source from what ``read_index`` returned."""
    config = folder.config
    opened = _Opened.of(config, index.parts[FILE_NAME], folder.files)
    mds = opened.index
    column = opened.column
    stored = opened.stored
    facts = index.facts
    dtype = np.dtype(facts["dtype"]).newbyteorder("<")
    samples = np.array([entry.samples for entry in mds.shards], dtype=np.int64)
    documents = None
    layout: StridedLayout | VariedLayout
    if "alike" in facts:
        alike = facts["alike"]
        fixed = [(place, bytes.fromhex(text)) for place, text in alike["fixed"]]
        starts = _first_bytes(mds, alike["stride"], opened.path)
        shape = {name: alike[name] for name in ("stride", "at", "count")}
        tokens = samples * alike["count"]
        tables = SampleTables(mds, column, stored, facts["dims"])
        varied = VariedLayout(dtype, column, tables, tokens, stored.path)
        layout = StridedLayout(dtype, starts, **shape, fixed=fixed, varied=varied)
    else:
        if column.size is not None:
            tokens = samples * (column.size // dtype.itemsize)
        else:
            tokens = np.frombuffer(index.parts["tokens"], "<i8").astype(np.int64)
        tables = SampleTables(mds, column, stored, facts["dims"])
        layout = VariedLayout(dtype, column, tables, tokens, stored.path)
        if column.size is None:
            documents = Documents(samples, tokens, layout.ends)
    digest = digest_json(
        {
            "form": "mds",
            "parts": {name: hashlib.sha256(data).hexdigest() for name, data in index.parts.items()},
            "column": column.name,
            "dtype": dtype.name,
        }
    )
    attributes = Facts(digest, _checked(mds), config.vocab_size, config.eod_id)
    return ShardedSource(stored, layout, tokens, attributes, documents)


def _prefer_decompressed(index: MdsIndex, where: str) -> MdsIndex:
    """Mark a shard as uncompressed if a local folder has it only decompressed, as StreamingDataset's cache does."""
    if not store.is_local(where):
        return index
    shards = []
    for entry in index.shards:
        compressed = entry.shard.compressed
        raw = entry.shard.raw
        if compressed and not os.path.exists(f"{where}/{compressed.name}") and os.path.exists(f"{where}/{raw.name}"):
            shards.append(replace(entry, shard=Shard(raw)))
        else:
            shards.append(entry)
    return replace(index, shards=tuple(shards))


def _fixed_size_by_index(columns: Columns, column: TokenColumn) -> dict[str, Any]:
    """Return the layout of samples of which no column varies in size."""
    assert column.size is not None
    assert column.dtype is not None
    sizes = [size for size in columns.sizes if size is not None]
    if column.size % column.dtype.itemsize:
        raise DataError(
            f"column '{column.name}' has {column.size} bytes, which is not a whole number of {column.dtype}",
            hint="is dtype right?",
        )
    count = column.size // column.dtype.itemsize
    return {"stride": sum(sizes), "at": sum(sizes[: column.place]), "count": count, "fixed": []}


def _check_heads(opened: _Opened, stride: int) -> None:
    """Raise DataError if a shard does not begin as the index says: a wrong sample count would shift its tokens.

    All shards of one writer contain the same config, so one shard is read for each size of the config: mostly one.
    """
    shards = opened.index.shards
    starts = _first_bytes(opened.index, stride, opened.path)
    by_config = {start - 4 * entry.samples: n for n, (start, entry) in enumerate(zip(starts, shards, strict=True))}
    heads = opened.stored.read([(n, 0, 8) for n in by_config.values()])
    for n, head in zip(by_config.values(), heads, strict=True):
        if np.frombuffer(head, "<u4").tolist() != [shards[n].samples, starts[n]]:
            raise DataError(
                f"{opened.stored.path(n)} does not begin as its index says ({shards[n].samples:,} samples)",
                hint="the shard or the index is damaged: copy both again",
            )


def _first_samples(opened: _Opened) -> tuple[dict[str, Any], SampleTables]:
    """Read dtype and dimensions from the first shard, and the size of its samples if all shards can have the same."""
    mds = opened.index
    column = opened.column
    stored = opened.stored
    shard = next((n for n, entry in enumerate(mds.shards) if entry.samples), None)
    if shard is None:
        raise DataError(f"{opened.path} lists no samples")
    size = mds.shards[shard].shard.raw.n_bytes
    begin, end = np.frombuffer(stored.read([(shard, 4, 12)])[0], "<u4").tolist()
    sample = stored.read([(shard, begin, min(end, size))])[0]
    varying = mds.shards[shard].varying()
    n_head = 4 * len(varying)
    if len(sample) < n_head:
        raise DataError(f"the first sample of {stored.path(shard)} ends before its sizes", hint="copy the shard again")
    varying_sizes = dict(zip(varying, np.frombuffer(sample[:n_head], "<u4").tolist(), strict=True))
    sizes = [varying_sizes[n] if size is None else size for n, size in enumerate(mds.shards[shard].sizes)]
    at = n_head + sum(sizes[: column.place])
    part = sample[at : at + sizes[column.place]]
    head, values = column.array(part, stored.path(shard))
    dims = part[int(column.dtype is None)] >> 2 if column.is_array and not column.has_shape else 1
    facts: dict[str, Any] = {"dtype": values.dtype.name, "dims": dims}
    tables = SampleTables(mds, column, stored, dims)
    table = tables.read([shard], values.dtype)[0]
    if values.size and _same_sizes(mds, table, shard) and _same_tables(opened, tables, len(sample), values.dtype):
        fixed = [[0, bytes(sample[:n_head]).hex()], [at, bytes(part[:head]).hex()]]
        facts["alike"] = {"stride": len(sample), "at": at + head, "count": values.size, "fixed": fixed}
    return facts, tables


def _same_sizes(mds: MdsIndex, table: SampleTable, shard: int) -> bool:
    """Whether every shard has the size that samples like those of the first shard would give it."""
    strides = np.unique(np.diff(table.offsets))
    counts = np.unique(np.diff(table.ends, prepend=0))
    if not mds.is_uniform or strides.size != 1 or counts.size != 1 or np.unique(table.sizes).size != 1:
        return False
    config = int(table.offsets[0]) - 4 * (mds.shards[shard].samples + 2)
    each = ((entry.shard.raw.n_bytes, entry.samples) for entry in mds.shards)
    return all(n_bytes == 4 * (n + 2) + config + n * int(strides[0]) for n_bytes, n in each)


def _same_tables(opened: _Opened, tables: SampleTables, stride: int, dtype: "np.dtype[Any]") -> bool:
    """Whether the tables of all shards have samples of ``stride`` bytes.

    Assumed to be so for more than 64 shards, or if reading a table means reading the whole shard; a shard with a
    different sample is then read by its table.
    """
    n = len(opened.index.shards)
    if n > _AT_ONCE or tables.needs_whole or opened.stored.any_compressed:
        return True
    return all((np.diff(table.offsets) == stride).all() for table in tables.read(range(n), dtype))


def _count_tokens(opened: _Opened, tables: SampleTables, dtype: "np.dtype[Any]") -> Int64s:
    shards = opened.index.shards
    whole = tables.needs_whole or opened.stored.any_compressed
    n_bytes = sum(entry.shard.file.n_bytes if whole else 4 * (entry.samples + 2) for entry in shards)
    log.get("data").info(
        "%s: samples differ in length, so %s of %s shards are read once to count their tokens",
        opened.stored.files.where,
        format_bytes(n_bytes),
        f"{len(shards):,}",
    )
    return np.array([table.n_tokens for table in _tables(tables, len(shards), dtype, whole)], dtype=np.int64)


def _tables(tables: SampleTables, n: int, dtype: "np.dtype[Any]", whole: bool) -> Iterator[SampleTable]:
    step = 1 if whole else _AT_ONCE
    for first in range(0, n, step):
        yield from tables.read(range(first, min(n, first + step)), dtype)


def _first_bytes(mds: MdsIndex, stride: int, path: str) -> list[int]:
    """Return the first byte of the samples of each shard: its size less that of the samples."""
    starts = []
    for number, entry in enumerate(mds.shards):
        start = entry.shard.raw.n_bytes - entry.samples * stride
        table_bytes = 4 * (entry.samples + 2)
        if not table_bytes <= start <= table_bytes + _MAX_CONFIG_BYTES:
            raise DataError(
                f"{path}, shard {number}: {entry.samples:,} samples of {stride:,} bytes do not make "
                f"{entry.shard.raw.n_bytes:,} bytes",
                hint="the index is damaged: copy it again",
            )
        starts.append(start)
    return starts


def _checked(mds: MdsIndex) -> str:
    hashes = ", ".join(mds.hashes)
    if all(entry.shard.compressed is not None for entry in mds.shards):
        return f"whole shards ({hashes})" if hashes else "sizes of whole shards (its index has no hashes)"
    if hashes:
        return f"sizes; the hashes of its index ({hashes}) only by verify, which reads whole shards"
    return "sizes (its index has no hashes)"
