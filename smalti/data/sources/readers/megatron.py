"""Megatron's ``.bin`` and ``.idx``: flat tokens, and an index of sequences and documents (MMIDIDX, version 1).

Of an index above 16 MiB only the beginning and the end are read at opening; the rest is checked when documents are
located, and by ``verify``. The modes, which mark mixed data, must all be 0: text.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.data.fetch import Files, Range
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.file_names import expand_names, map_files
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.readers.sharded_source import Facts, FlatLayout, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredFile, StoredShards
from smalti.data.sources.source import Int64s

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_SMALL_BYTES = 16 << 20


@dataclass(frozen=True)
class _Head:
    dtype: "np.dtype[Any]"
    n_sequences: int
    n_ends: int
    """Entries of the table of documents: the number of documents plus one."""

    @property
    def pointers_at(self) -> int:
        return _HEAD.size + 4 * self.n_sequences

    @property
    def ends_at(self) -> int:
        return self.pointers_at + 8 * self.n_sequences

    @property
    def modes_at(self) -> int:
        return self.ends_at + 8 * self.n_ends


def read_index(folder: SourceFolder) -> Index:
    """Read the headers of the ``.idx`` files, and the number of tokens in their ``.bin`` files."""
    files = folder.files
    prefixes = [_bare(folder.file)]
    if not folder.file:
        names = [name if any(sign in name for sign in "*?[") else f"{_bare(name)}.idx" for name in folder.config.files]
        prefixes = [_bare(name) for name in expand_names(files, names, [".idx"])]
    entries = map_files(files, lambda prefix: _describe(files, prefix), prefixes)
    kinds = sorted({entry["dtype"] for entry in entries})
    if len(kinds) > 1:
        raise DataError(f"the files of {files.where} hold {' and '.join(kinds)}", allowed="one dtype for all")
    return Index("megatron", {"files": entries})


def open_source(folder: SourceFolder, index: Index) -> ShardedSource:
    """Open the source from what ``read_index`` returned."""
    config, files = folder.config, folder.files
    entries = index.facts["files"]
    dtype = np.dtype(entries[0]["dtype"]).newbyteorder("<")
    tokens = np.array([entry["tokens"] for entry in entries], dtype=np.int64)
    shards = [Shard(StoredFile(f"{entry['prefix']}.bin", entry["tokens"] * dtype.itemsize)) for entry in entries]
    counts = np.array([entry["documents"] for entry in entries], dtype=np.int64)
    documents = Documents(counts, tokens, lambda shard: _document_ends(files, entries[shard]))
    checked = "sizes, and the index against itself (the format has no hashes)"
    facts = Facts(digest_json({"form": "megatron", "files": entries}), checked, config.vocab_size, config.eod_id)
    return ShardedSource(StoredShards(files, shards), FlatLayout(dtype, [0] * len(entries)), tokens, facts, documents)


def _bare(name: str) -> str:
    return name.removesuffix(".idx").removesuffix(".bin")


def _describe(files: Files, prefix: str) -> dict[str, Any]:
    """Return the metadata of one ``.idx`` file and its ``.bin`` file, whose size is checked."""
    name = f"{prefix}.idx"
    path = f"{files.where}/{name}"
    size = files.size(name)
    head = _head(bytes(files.read([Range(name, 0, min(size, _HEAD.size))])[0]), path)
    if size not in (head.modes_at, head.modes_at + head.n_sequences):
        raise DataError(
            f"{path} has {size:,} bytes, its header requires {head.modes_at:,}",
            hint="the file is cut short or damaged: copy it again",
        )
    if not head.n_sequences:
        raise DataError(f"{path} lists no sequences")
    if size <= _SMALL_BYTES:
        data = files.read([Range(name, 0, size)])[0]
        n_tokens = int(_tables(data, head, path)[0].sum())
        seen = hashlib.sha256(data).hexdigest()
    else:
        last = head.n_sequences - 1
        length, pointer, end = files.read(
            [
                Range(name, _HEAD.size + 4 * last, 4),
                Range(name, head.pointers_at + 8 * last, 8),
                Range(name, head.ends_at + 8 * (head.n_ends - 1), 8),
            ]
        )
        n_bytes = int(np.frombuffer(pointer, "<i8")[0]) + int(np.frombuffer(length, "<i4")[0]) * head.dtype.itemsize
        n_tokens, rest = divmod(n_bytes, head.dtype.itemsize)
        if rest or n_tokens < 0 or int(np.frombuffer(end, "<i8")[0]) != head.n_sequences:
            raise DataError(f"the end of {path} does not match its header", hint="copy it again")
        seen = hashlib.sha256(b"".join((length, pointer, end))).hexdigest()
    _check_bin(files, f"{prefix}.bin", n_tokens * head.dtype.itemsize, path)
    return {
        "prefix": prefix,
        "dtype": head.dtype.name,
        "tokens": n_tokens,
        "sequences": head.n_sequences,
        "documents": head.n_ends - 1,
        "index": [size, seen],
    }


def _head(data: bytes, path: str) -> _Head:
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise DataError(f"{path} is not an index of Megatron's", allowed="MMIDIDX, version 1")
    _, version, code, n_sequences, n_ends = _HEAD.unpack(data)
    if version != 1:
        raise DataError(f"{path} has version {version}", allowed="1")
    dtype = np.dtype(_DTYPES.get(code, "V1"))
    if dtype.kind not in "iu":
        raise DataError(f"{path} is for {_DTYPES.get(code, f'numbers of kind {code}')}", allowed="whole numbers")
    if n_ends < 1:
        raise DataError(f"{path} has no table of documents", hint="the file is damaged: copy it again")
    return _Head(dtype.newbyteorder("<"), n_sequences, n_ends)


def _tables(data: memoryview, head: _Head, path: str) -> tuple[Int64s, Int64s]:
    """Return the lengths of the sequences in tokens and the ends of the documents in sequences, all checked."""
    lengths = np.frombuffer(data, "<i4", count=head.n_sequences, offset=_HEAD.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", count=head.n_sequences, offset=head.pointers_at)
    ends = np.frombuffer(data, "<i8", count=head.n_ends, offset=head.ends_at).astype(np.int64)
    modes = np.frombuffer(data, np.int8, offset=head.modes_at)
    begins = np.cumsum(lengths) - lengths
    if (lengths < 0).any() or (pointers != begins * head.dtype.itemsize).any():
        raise DataError(
            f"the sequences of {path} are not contiguous",
            hint="the file is damaged, or was not written by Megatron's builder: copy it again",
        )
    if int(ends[0]) != 0 or int(ends[-1]) != head.n_sequences or (np.diff(ends) < 0).any():
        raise DataError(f"the documents of {path} do not cover all of its sequences", hint="copy it again")
    if modes.any():
        raise DataError(f"{path} has sequences that are not text (mode {int(modes[modes != 0][0])})", allowed="mode 0")
    return lengths, ends


def _check_bin(files: Files, name: str, n_bytes: int, path: str) -> None:
    size = files.size(name)
    if size != n_bytes:
        raise DataError(
            f"{files.where}/{name} has {size:,} bytes, {path} requires {n_bytes:,}",
            hint="one of the two is truncated or belongs to other data: copy both again",
        )


def _document_ends(files: Files, entry: dict[str, Any]) -> Int64s:
    """Return the ends of the documents in tokens; reads the whole index."""
    name = f"{entry['prefix']}.idx"
    path = f"{files.where}/{name}"
    data = files.read([Range(name, 0, entry["index"][0])])[0]
    head = _head(bytes(data[: _HEAD.size]), path)
    if (head.n_sequences, head.n_ends - 1) != (entry["sequences"], entry["documents"]):
        raise DataError(f"{path} was changed after it was opened", hint="start again")
    lengths, ends = _tables(data, head, path)
    if int(lengths.sum()) != entry["tokens"]:
        raise DataError(f"{path} was changed after it was opened", hint="start again")
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)[ends[1:]]
