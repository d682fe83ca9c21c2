"""MDS data sets of mosaicml-streaming, read as their own reader does, without its cache and without pickles.

Tokens are one column of every sample, samples and shards in the order of the index. A sample counts as a document where
samples differ in length. Where they are all alike, tokens are found by arithmetic; else every shard's table (and every
shard, where it is packed or several columns vary) is read once at opening, to count its tokens.
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
_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class _Opened:
    """What both halves of an opening begin with."""

    index: MdsIndex
    column: TokenColumn
    stored: StoredShards
    path: str

    @classmethod
    def of(cls, config: SourceConfig, data: bytes, files: Files) -> "_Opened":
        path = f"{files.where}/{FILE_NAME}"
        index = _as_it_lies(parse_index(data, path), files.where)
        column = choose_column(index.columns, config.column, config.dtype, path)
        return cls(index, column, StoredShards(files, [one.shard for one in index.shards]), path)


def read_index(folder: SourceFolder) -> Index:
    """Read index.json, and what it does not say: the size of samples, or the tokens of each shard."""
    data = folder.index_file
    opened = _Opened.of(folder.config, data, folder.files)
    column, parts = opened.column, {FILE_NAME: data}
    facts: dict[str, Any] = {}
    if column.size is not None and column.dtype is not None:
        facts = {"dtype": column.dtype.name, "dims": 1}
        if None not in opened.index.columns.sizes:
            facts["alike"] = _alike_by_index(opened.index.columns, column)
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
    mds, column, stored, facts = opened.index, opened.column, opened.stored, index.facts
    dtype = np.dtype(facts["dtype"]).newbyteorder("<")
    samples = np.array([one.samples for one in mds.shards], dtype=np.int64)
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
    named = Facts(digest, _checked(mds), config.vocab_size, config.eod_id)
    return ShardedSource(stored, layout, tokens, named, documents)


def _as_it_lies(index: MdsIndex, where: str) -> MdsIndex:
    """In a local folder a shard may lie there unpacked only, as their reader leaves it: then it is a plain one."""
    if not store.is_local(where):
        return index
    shards = []
    for one in index.shards:
        packed, raw = one.shard.packed, one.shard.raw
        if packed and not os.path.exists(f"{where}/{packed.name}") and os.path.exists(f"{where}/{raw.name}"):
            one = replace(one, shard=Shard(raw))
        shards.append(one)
    return replace(index, shards=tuple(shards))


def _alike_by_index(columns: Columns, column: TokenColumn) -> dict[str, Any]:
    """Samples where no column varies."""
    assert column.size is not None
    assert column.dtype is not None
    sizes = [size for size in columns.sizes if size is not None]
    if column.size % column.dtype.itemsize:
        raise DataError(f"column '{column.name}' has {column.size} bytes of {column.dtype}", hint="is dtype right?")
    count, at = column.size // column.dtype.itemsize, sum(sizes[: column.place])
    return {"stride": sum(sizes), "at": at, "count": count, "fixed": []}


def _check_heads(opened: _Opened, stride: int) -> None:
    """DataError where shards do not begin as the index says: a wrong number of samples would shift their tokens.

    A writer puts the same config into all its shards. So one is looked at of those with equal room for it: mostly one.
    """
    shards, starts = opened.index.shards, _first_bytes(opened.index, stride, opened.path)
    alike = {start - 4 * one.samples: n for n, (start, one) in enumerate(zip(starts, shards, strict=True))}
    heads = opened.stored.read([(n, 0, 8) for n in alike.values()])
    for n, head in zip(alike.values(), heads, strict=True):
        if np.frombuffer(head, "<u4").tolist() != [shards[n].samples, starts[n]]:
            raise DataError(
                f"{opened.stored.path(n)} does not begin as its index says ({shards[n].samples:,} samples)",
                hint="the shard or the index is damaged: copy both again",
            )


def _first_samples(opened: _Opened) -> tuple[dict[str, Any], SampleTables]:
    """What the first shard says of its samples: dtype, dimensions, and the one size where all shards can have it."""
    mds, column, stored = opened.index, opened.column, opened.stored
    shard = next((n for n, one in enumerate(mds.shards) if one.samples), None)
    if shard is None:
        raise DataError(f"{opened.path} lists no samples")
    size = mds.shards[shard].shard.raw.n_bytes
    begin, end = np.frombuffer(stored.read([(shard, 4, 12)])[0], "<u4").tolist()
    sample = stored.read([(shard, begin, min(end, size))])[0]
    varying = mds.shards[shard].varying()
    n_head = 4 * len(varying)
    if len(sample) < n_head:
        raise DataError(f"the first sample of {stored.path(shard)} ends before its sizes", hint="copy the shard again")
    said = dict(zip(varying, np.frombuffer(sample[:n_head], "<u4").tolist(), strict=True))
    sizes = [said[n] if one is None else one for n, one in enumerate(mds.shards[shard].sizes)]
    at = n_head + sum(sizes[: column.place])
    part = sample[at : at + sizes[column.place]]
    head, values = column.array(part, stored.path(shard))
    dims = part[int(column.dtype is None)] >> 2 if column.is_array and not column.has_shape else 1
    facts: dict[str, Any] = {"dtype": values.dtype.name, "dims": dims}
    tables = SampleTables(mds, column, stored, dims)
    table = tables.read([shard], values.dtype)[0]
    if values.size and _all_alike(mds, table, shard) and _tables_alike(opened, tables, len(sample), values.dtype):
        fixed = [[0, bytes(sample[:n_head]).hex()], [at, bytes(part[:head]).hex()]]
        facts["alike"] = {"stride": len(sample), "at": at + head, "count": values.size, "fixed": fixed}
    return facts, tables


def _all_alike(mds: MdsIndex, table: SampleTable, shard: int) -> bool:
    """Whether every shard has the size that it would have with samples like those of the first one."""
    strides = np.unique(np.diff(table.offsets))
    counts = np.unique(np.diff(table.ends, prepend=0))
    if not mds.is_uniform or strides.size != 1 or counts.size != 1 or np.unique(table.sizes).size != 1:
        return False
    config = int(table.offsets[0]) - 4 * (mds.shards[shard].samples + 2)
    each = ((one.shard.raw.n_bytes, one.samples) for one in mds.shards)
    return all(n_bytes == 4 * (n + 2) + config + n * int(strides[0]) for n_bytes, n in each)


def _tables_alike(opened: _Opened, tables: SampleTables, stride: int, dtype: "np.dtype[Any]") -> bool:
    """Whether the table of every shard says so too. Of many shards, or where they must be fetched whole for it, it is
    believed; a shard with a sample that differs is then read by its table."""
    n = len(opened.index.shards)
    if n > _AT_ONCE or tables.needs_whole or opened.stored.any_packed:
        return True
    return all((np.diff(table.offsets) == stride).all() for table in tables.read(range(n), dtype))


def _count_tokens(opened: _Opened, tables: SampleTables, dtype: "np.dtype[Any]") -> Int64s:
    shards = opened.index.shards
    whole = tables.needs_whole or opened.stored.any_packed
    n_bytes = sum(one.shard.file.n_bytes if whole else 4 * (one.samples + 2) for one in shards)
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
    """Where the samples of each shard begin: what is left of it in front of them."""
    starts = []
    for number, one in enumerate(mds.shards):
        start, table = one.shard.raw.n_bytes - one.samples * stride, 4 * (one.samples + 2)
        if not table <= start <= table + _MOST_CONFIG_BYTES:
            raise DataError(
                f"{path}, shard {number}: {one.samples:,} samples of {stride:,} bytes do not make "
                f"{one.shard.raw.n_bytes:,} bytes",
                hint="the index is damaged: copy it again",
            )
        starts.append(start)
    return starts


def _checked(mds: MdsIndex) -> str:
    packed, named = [one.shard.packed is not None for one in mds.shards], ", ".join(mds.hashes)
    if all(packed):
        return f"whole shards ({named})" if named else "sizes of whole shards (its index has no hashes)"
    if named:
        return f"sizes; the hashes of its index ({named}) only by verify, which reads whole shards"
    return "sizes (its index has no hashes)"
