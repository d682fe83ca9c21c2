"""Parses and checks ``index.json`` of an MDS data set: its shards and their columns.

The format: https://docs.mosaicml.com/projects/streaming (version 2); ``mds_columns`` decodes the columns.
"""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from smalti.base.errors import DataError
from smalti.data.fetch.files import confined
from smalti.data.sources.readers.decompress import known_compressions
from smalti.data.sources.readers.index import parsed_json
from smalti.data.sources.readers.shards import Shard, StoredFile, known_hashes

FILE_NAME = "index.json"
VERSION = 2
_U32 = 1 << 32


@dataclass(frozen=True)
class Columns:
    """Columns in the order of their data in a sample."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    """Bytes of each column; None: its samples or shards have different sizes."""


@dataclass(frozen=True)
class MdsShard:
    """One entry of the index."""

    samples: int
    shard: Shard
    sizes: tuple[int | None, ...]
    """Bytes of each column in this shard; None: each sample has its size."""

    def varying(self) -> list[int]:
        """Return the columns whose size varies between the samples of this shard."""
        return [place for place, size in enumerate(self.sizes) if size is None]


@dataclass(frozen=True)
class MdsIndex:
    """The content of index.json."""

    columns: Columns
    shards: tuple[MdsShard, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether each column has the same size, or varies, in all shards."""
        return len({entry.sizes for entry in self.shards}) == 1

    @property
    def hashes(self) -> list[str]:
        """Hash algorithms of which every file has a digest."""
        files = [file for entry in self.shards for file in (entry.shard.raw, entry.shard.compressed) if file]
        return sorted(set.intersection(*(set(file.hashes) for file in files)))


def parse_index(data: bytes, path: str) -> MdsIndex:
    """Parse and check the index. Raises DataError, naming the shard, if it violates the format."""
    value = parsed_json(data, path)
    if not isinstance(value, dict) or value.get("version") != VERSION or not isinstance(value.get("shards"), list):
        version = value.get("version") if isinstance(value, dict) else type(value).__name__
        raise DataError(
            f"{path} is not the index of an MDS data set (version {version!r})", allowed=f"version {VERSION}"
        )
    shards: list[MdsShard] = []
    columns: Columns | None = None
    for number, entry in enumerate(value["shards"]):
        try:
            shard_columns, shard = _shard(entry)
        except DataError as error:
            message = f"{path}, shard {number}: {error.message}"
            raise DataError(message, allowed=error.allowed, hint=error.hint) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}, shard {number}: {error!r}", hint="the index is damaged: copy it again") from error
        columns = columns or shard_columns
        if (columns.names, columns.encodings) != (shard_columns.names, shard_columns.encodings):
            shown = ", ".join(
                f"{name} ({encoding})"
                for name, encoding in zip(shard_columns.names, shard_columns.encodings, strict=True)
            )
            raise DataError(f"{path}, shard {number} has other columns than the shards before: {shown}")
        shards.append(shard)
    if columns is None:
        raise DataError(f"{path} lists no shards")
    by_column = zip(*(shard.sizes for shard in shards), strict=True)
    sizes = tuple(column_sizes[0] if len(set(column_sizes)) == 1 else None for column_sizes in by_column)
    return MdsIndex(replace(columns, sizes=sizes), tuple(shards))


def _shard(entry: dict[str, Any]) -> tuple[Columns, MdsShard]:
    if entry.get("format") != "mds" or entry.get("version") != VERSION:
        raise DataError(
            f"its format is {entry.get('format')!r}, version {entry.get('version')!r}",
            allowed=f"mds, version {VERSION}",
            hint="convert json and csv shards to Parquet or JSONL and run 'smalti data tokenize'",
        )
    columns = Columns(
        tuple(_text(name) for name in entry["column_names"]),
        tuple(_text(encoding) for encoding in entry["column_encodings"]),
        tuple(None if size is None else _whole(size, "a column's size", 1) for size in entry["column_sizes"]),
    )
    if not len(columns.names) == len(columns.encodings) == len(columns.sizes) > 0:
        raise DataError("its columns have different numbers of names, encodings and sizes")
    for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True):
        n_bytes = fixed_bytes(encoding)
        if n_bytes not in (None, size):
            raise DataError(f"column '{name}' is {encoding}, of {size} bytes", allowed=f"{n_bytes} bytes")
    compression = entry["compression"]
    if compression is not None and _text(compression).partition(":")[0] not in known_compressions():
        raise DataError(f"compression '{compression}' is not known", allowed=", ".join(sorted(known_compressions())))
    raw = _file(entry["raw_data"])
    compressed = _file(entry["zip_data"]) if compression is not None else None
    samples = _whole(entry["samples"], "samples", 0)
    if 4 * (samples + 2) > raw.n_bytes:
        raise DataError(f"{raw.name} has {raw.n_bytes:,} bytes, too few for {samples:,} samples")
    return columns, MdsShard(samples, Shard(raw, compressed, compression), columns.sizes)


def fixed_bytes(encoding: str) -> int | None:
    """Return the bytes of every value of this encoding; None if values can differ in size."""
    scalar = re.fullmatch(r"(?:u?int|float)(8|16|32|64)|int", encoding)
    if scalar:
        return int(scalar[1] or 64) // 8
    array = re.fullmatch(r"ndarray:[a-z]+(8|16|32|64):([1-9]\d{0,9}(?:,[1-9]\d{0,9})*)", encoding)
    return int(array[1]) // 8 * prod(map(int, array[2].split(","))) if array else None


def _file(value: dict[str, Any]) -> StoredFile:
    hashes = {_text(name): _text(digest) for name, digest in (value["hashes"] or {}).items()}
    unknown = sorted(set(hashes) - known_hashes())
    if unknown:
        raise DataError(f"the hash '{unknown[0]}' cannot be checked here", allowed=", ".join(sorted(known_hashes())))
    return StoredFile(confined(_text(value["basename"])), _whole(value["bytes"], "bytes", 0), hashes)


def _whole(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _U32:
        raise DataError(f"{what} is {str(value)[:40]}", allowed=f"a whole number from {least} to {_U32 - 1:,}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{str(value)[:40]} is not text")
    return value
