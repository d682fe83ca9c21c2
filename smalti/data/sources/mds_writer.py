"""Exports tokens as an MDS data set, which mosaicml-streaming's StreamingDataset reads.

Samples keep the order of the source; tokens that do not fill the last row are dropped and counted. Every shard appears
whole or not at all and index.json is written last, so an interrupted export is not a data set, and the same command
starts it again. Memory: one shard. Does not shuffle.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import UserError, missing_extra
from smalti.data.sources.readers.mds_index import FILE_NAME, VERSION
from smalti.data.sources.readers.shards import hash_of, known_hashes
from smalti.data.sources.source import Source
from smalti.data.tokens import TokenSource

MdsDtype = Literal["uint16", "int32", "uint32", "int64"]
Progress = Callable[[str, int, int], None]
_READ_TOKENS = 1 << 20
_ZSTD = re.compile(r"zstd(:([1-9]|1[0-9]|2[0-2]))?")
_MARK = ".being-written-by-smalti"
"""A file in a local folder until its index is written: shards are removed only from a folder that has it."""
_OURS = re.compile(r"\.being-written-by-smalti|\.?shard\.\d{5,}\.mds(\.zstd)?(\.\d+\.tmp)?")


@dataclass(frozen=True)
class MdsOptions:
    """Options of the samples and shards."""

    seq_len: int | None = None
    """Tokens in a sample; None: a sample is a document, including its closing token."""
    column: str = "tokens"
    dtype: MdsDtype | None = None
    """None: uint16 if the ids fit, else int32."""
    compression: str | None = None
    """``zstd`` or ``zstd:LEVEL``."""
    hashes: tuple[str, ...] = ("sha1",)
    """Hash algorithms of hashlib and xxhash that are computed for every file."""
    shard_bytes: int = 1 << 26


@dataclass
class MdsReport:
    """Counts of an export, or of the plan of one."""

    samples: int = 0
    tokens: int = 0
    left_out_tokens: int = 0
    shards: int = 0
    n_bytes: int = 0
    """Bytes on disk without index.json; 0 for a plan."""
    dtype: str = ""
    samples_known: bool = True
    """False: ``samples`` is unknown until the documents are written."""


def plan_mds(source: Source, options: MdsOptions) -> MdsReport:
    """Return the report of ``write_mds`` without writing. Raises UserError for invalid options."""
    dtype = _dtype(source, options)
    if options.compression is not None and not _ZSTD.fullmatch(options.compression):
        raise UserError(f"compression={options.compression} is not supported", allowed="zstd, or zstd:1 to zstd:22")
    unknown = sorted(set(options.hashes) - known_hashes())
    if unknown:
        raise UserError(f"the hash '{unknown[0]}' is not known", allowed=", ".join(sorted(known_hashes())))
    if not 1 << 10 <= options.shard_bytes < 1 << 32:
        raise UserError(f"a shard cannot have {options.shard_bytes:,} bytes", allowed="1,024 to 4,294,967,295")
    if options.seq_len is None:
        n = source.n_documents
        if n is None and source.eod_id is None:
            raise UserError(
                f"{source.where} records neither where its documents end nor which token closes one",
                hint="give --seq-len N for samples of N tokens, or the token that closes a document: eod_id=0",
            )
        return MdsReport(n or 0, source.n_tokens, dtype=dtype, samples_known=n is not None)
    if not 1 <= options.seq_len <= source.n_tokens:
        raise UserError(
            f"samples cannot have {options.seq_len:,} tokens: the source has {source.n_tokens:,}",
            allowed=f"1 to {source.n_tokens:,}",
        )
    samples, left = divmod(source.n_tokens, options.seq_len)
    return MdsReport(samples, source.n_tokens - left, left, dtype=dtype)


def write_mds(source: Source, folder: str, options: MdsOptions, progress: Progress | None = None) -> MdsReport:
    """Write all of ``source`` into ``folder``, local or a URL, which must not contain a data set."""
    plan = plan_mds(source, options)
    _prepare_folder(folder)
    shape = f":{options.seq_len}" if options.seq_len else ""
    columns = {
        "column_encodings": [f"ndarray:{plan.dtype}{shape}"],
        "column_names": [options.column],
        "column_sizes": [options.seq_len * np.dtype(plan.dtype).itemsize if options.seq_len else None],
    }
    report = MdsReport(left_out_tokens=plan.left_out_tokens, dtype=plan.dtype)
    shards = _Shards(folder, options, columns, report)
    samples = _rows(source, options.seq_len, plan.samples) if options.seq_len else _documents(source)
    for tokens in samples:
        shards.add(_encoded(tokens, plan.dtype, fixed=bool(options.seq_len)))
        report.tokens += tokens.size
        if progress is not None:
            progress("writing MDS", min(report.tokens, plan.tokens), max(plan.tokens, 1))
    shards.finish()
    return report


@dataclass
class _Shards:
    """Collects samples into shards, as MDSWriter does, and writes the index at the end."""

    folder: str
    options: MdsOptions
    columns: dict[str, Any]
    report: MdsReport
    entries: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[bytes] = field(default_factory=list)
    waiting_bytes: int = 0

    def __post_init__(self) -> None:
        self.config = {
            **self.columns,
            "compression": self.options.compression,
            "format": "mds",
            "hashes": sorted(self.options.hashes),
            "size_limit": self.options.shard_bytes,
            "version": VERSION,
        }
        self.config_text = json.dumps(self.config, sort_keys=True).encode()

    def add(self, sample: bytes) -> None:
        """Append a sample; begins a new shard if it does not fit into the current one."""
        size = self._size(len(self.waiting) + 1, self.waiting_bytes + len(sample))
        if self.waiting and size > self.options.shard_bytes:
            self._write()
        if self._size(1, len(sample)) >= 1 << 32:
            raise UserError(
                f"a document has {len(sample):,} bytes", allowed="less than 4 GiB in a sample", hint="give --seq-len N"
            )
        self.waiting.append(sample)
        self.waiting_bytes += len(sample)

    def finish(self) -> None:
        """Write the last shard and the index."""
        if self.waiting:
            self._write()
        text = json.dumps({"shards": self.entries, "version": VERSION}, sort_keys=True)
        store.write_text(store.join(self.folder, FILE_NAME), text)
        if store.is_local(self.folder):
            (Path(self.folder) / _MARK).unlink(missing_ok=True)

    def _size(self, samples: int, n_bytes: int) -> int:
        return 4 * (samples + 2) + len(self.config_text) + n_bytes

    def _write(self) -> None:
        sizes = [0, *map(len, self.waiting)]
        first = self._size(len(self.waiting), 0)
        offsets = np.cumsum(sizes, dtype=np.int64) + first
        head = np.array([len(self.waiting), *offsets], dtype="<u4").tobytes()
        data = b"".join((head, self.config_text, *self.waiting))
        name = f"shard.{len(self.entries):05d}.mds"
        compressed = None
        if self.options.compression is not None:
            compressed = _zstd(data, self.options.compression)
        self.entries.append(
            {
                **self.config,
                "raw_data": self._file(name, data),
                "samples": len(self.waiting),
                "zip_data": None if compressed is None else self._file(f"{name}.zstd", compressed),
            }
        )
        written = data if compressed is None else compressed
        store.write_bytes(store.join(self.folder, name if compressed is None else f"{name}.zstd"), written)
        self.report.samples += len(self.waiting)
        self.report.shards += 1
        self.report.n_bytes += len(written)
        self.waiting = []
        self.waiting_bytes = 0

    def _file(self, name: str, data: bytes) -> dict[str, Any]:
        hashes = {algorithm: hash_of(algorithm, data) for algorithm in sorted(self.options.hashes)}
        return {"basename": name, "bytes": len(data), "hashes": hashes}


def _rows(source: Source, seq_len: int, n: int) -> Iterator[npt.NDArray[Any]]:
    at_once = max(1, _READ_TOKENS // seq_len)
    for first in range(0, n, at_once):
        rows = np.empty((min(at_once, n - first), seq_len), source.dtype)
        source.read_rows(np.arange(first, first + len(rows), dtype=np.int64) * seq_len, rows)
        yield from rows


def _documents(source: Source) -> Iterator[npt.NDArray[Any]]:
    """Yield the documents: by number, or by closing token if the source has no numbers or is a ``TokenSource``."""
    if source.n_documents is None or isinstance(source, TokenSource):
        yield from _documents_by_closing_token(source)
        return
    buffer = np.empty(0, source.dtype)
    first = 0
    for number in range(source.n_documents):
        begin, end = source.document_span(number)
        while first + buffer.size < end:
            buffer = np.concatenate([buffer[begin - first :], _chunk(source, first + buffer.size)])
            first = begin
        yield buffer[begin - first : end - first]


def _documents_by_closing_token(source: Source) -> Iterator[npt.NDArray[Any]]:
    """Yield the tokens up to and including each closing token; tokens after the last one are a document too."""
    rest = np.empty(0, source.dtype)
    for begin in range(0, source.n_tokens, _READ_TOKENS):
        chunk = _chunk(source, begin)
        parts = np.split(chunk, np.flatnonzero(chunk == source.eod_id) + 1)
        parts[0] = np.concatenate([rest, parts[0]])
        yield from parts[:-1]
        rest = parts[-1]
    if rest.size:
        yield rest


def _chunk(source: Source, begin: int) -> npt.NDArray[Any]:
    chunk = np.empty((1, min(_READ_TOKENS, source.n_tokens - begin)), source.dtype)
    source.read_rows(np.array([begin], dtype=np.int64), chunk)
    return np.asarray(chunk[0])


def _encoded(tokens: npt.NDArray[Any], dtype: str, *, fixed: bool) -> bytes:
    values = tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    if fixed:
        return values
    width = next(code for code, high in enumerate((1 << 8, 1 << 16, 1 << 32)) if tokens.size < high)
    part = bytes([1 << 2 | width]) + tokens.size.to_bytes(1 << width, "little") + values
    return len(part).to_bytes(4, "little") + part


def _dtype(source: Source, options: MdsOptions) -> str:
    highest = (source.vocab_size or (1 << 16 if source.dtype.itemsize == 2 else 1 << 32)) - 1
    wanted = options.dtype or ("uint16" if highest < 1 << 16 else "int32")
    if source.vocab_size is None and options.dtype is None and source.dtype.itemsize == 4:
        wanted = "uint32"
    if highest > np.iinfo(wanted).max:
        raise UserError(f"dtype={wanted} does not hold ids up to {highest:,}", allowed="uint32 or int64")
    return wanted


def _prepare_folder(folder: str) -> None:
    """Create the folder and mark it as an export of Smalti; files of an interrupted export in it are removed."""
    if store.exists(store.join(folder, FILE_NAME)):
        raise UserError(f"{folder} already holds an {FILE_NAME}", hint="name another folder, or remove this one first")
    store.make_folder(folder)
    if not store.is_local(folder):
        return
    names = os.listdir(folder)
    foreign = sorted(name for name in names if not _OURS.fullmatch(name) and not name.startswith(f".{FILE_NAME}."))
    if names and (foreign or _MARK not in names):
        raise UserError(
            f"{folder} is not empty: it holds '{foreign[0] if foreign else min(names)}'", hint="name another folder"
        )
    (Path(folder) / _MARK).touch()
    for name in names:
        if name != _MARK:
            (Path(folder) / name).unlink()


def _zstd(data: bytes, compression: str) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise missing_extra("zstandard", "mds", "compression=zstd", error) from error
    level = int(compression.partition(":")[2] or 3)
    return bytes(zstandard.ZstdCompressor(level=level).compress(data))
