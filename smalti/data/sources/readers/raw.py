"""Plain token files: ``.npy`` (never with pickles), or numbers without a header (OLMo, datatrove, nanoGPT and others).

The files of a folder are concatenated to one array. Only their sizes can be checked, not their content.
"""

import io
from typing import Any

import numpy as np

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json
from smalti.config.data import SourceConfig
from smalti.config.token_formats import FORMATS
from smalti.data.fetch import Files, Range
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.file_names import expand_names, map_files
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.readers.sharded_source import Facts, FlatLayout, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredFile, StoredShards
from smalti.data.sources.source import Int64s

_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 4096
_MAX_HEADER_BYTES = 1 << 16


def read_index(folder: SourceFolder) -> Index:
    """Read the names and sizes of the files, and where the tokens begin in each."""
    config, files = folder.config, folder.files
    names = [folder.file] if folder.file else expand_names(files, config.files, FORMATS["raw"].suffixes)
    entries = map_files(files, lambda name: _describe(config, files, name), names)
    kinds = sorted({entry["dtype"] for entry in entries})
    if len(kinds) > 1:
        raise DataError(f"the files of {files.where} hold {' and '.join(kinds)}", allowed="one dtype for all")
    if config.document_ends is not None:
        sizes = map_files(files, files.size, [name + config.document_ends for name in names])
        for entry, size in zip(entries, sizes, strict=True):
            entry["documents"] = size // 8
    return Index("raw", {"files": entries})


def open_source(folder: SourceFolder, index: Index) -> ShardedSource:
    """Open the source from what ``read_index`` returned."""
    config, files = folder.config, folder.files
    entries = index.facts["files"]
    dtype = np.dtype(entries[0]["dtype"])
    stored = StoredShards(files, [Shard(StoredFile(entry["name"], entry["bytes"])) for entry in entries])
    tokens = np.array([entry["tokens"] for entry in entries], dtype=np.int64)
    documents = None
    if config.document_ends is not None:
        counts = np.array([entry["documents"] for entry in entries], dtype=np.int64)
        documents = Documents(counts, tokens, lambda shard: _document_ends(config, files, entries[shard]))
    digest = digest_json({"form": "raw", "files": entries})
    facts = Facts(digest, "sizes (the format has no hashes)", config.vocab_size, config.eod_id)
    return ShardedSource(stored, FlatLayout(dtype, [entry["start"] for entry in entries]), tokens, facts, documents)


def _describe(config: SourceConfig, files: Files, name: str) -> dict[str, Any]:
    """Return name, bytes, dtype, first byte and tokens of a file."""
    size = files.size(name)
    path = f"{files.where}/{name}"
    if name.endswith(".npy"):
        head = bytes(files.read([Range(name, 0, min(size, _HEADER_BYTES))])[0])
        if head.startswith(_MAGIC):
            if len(head) < size:
                need = 12 + int.from_bytes(head[8 : 10 if head[6] == 1 else 12], "little")
                if len(head) < need <= min(size, _MAX_HEADER_BYTES):
                    head = bytes(files.read([Range(name, 0, need)])[0])
            dtype, start, n_tokens = _npy(head, path)
            if config.dtype is not None and np.dtype(config.dtype) != dtype.newbyteorder("="):
                raise UserError(f"dtype={config.dtype}, but the header of {path} says {dtype.name}", hint="omit dtype")
            if start + n_tokens * dtype.itemsize != size:
                raise DataError(
                    f"{path} has {size:,} bytes; its header says {n_tokens:,} numbers of {dtype.name}",
                    hint="the file is cut short or damaged: copy it again",
                )
            return {"name": name, "bytes": size, "dtype": dtype.str, "start": start, "tokens": n_tokens}
    if config.dtype is None:
        raise UserError(
            f"the dtype of {path} is unknown: the file has no header",
            allowed="uint16, uint32, int32 ...",
            hint="set it in the source's section: dtype=uint16",
        )
    dtype = np.dtype(config.dtype).newbyteorder("<")
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, which is not a whole number of {config.dtype}",
            hint="is dtype right? Else the file is cut short: copy it again",
        )
    return {"name": name, "bytes": size, "dtype": dtype.str, "start": 0, "tokens": size // dtype.itemsize}


def _npy(head: bytes, path: str) -> tuple["np.dtype[Any]", int, int]:
    """Return dtype, first byte and number of tokens from the header of a ``.npy`` file."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:  # numpy's parser raises many kinds of errors
        raise DataError(f"the header of {path} cannot be read: {error}", hint="copy it again") from error
    if dtype.kind not in "iu" or dtype.hasobject:
        raise DataError(f"{path} holds {dtype}", allowed="whole numbers: token ids")
    if not 1 <= len(shape) <= 2 or any(not isinstance(n, int) or n < 0 for n in shape):
        raise DataError(f"{path} holds an array {shape}", allowed="one dimension, or two (rows of tokens)")
    if fortran and len(shape) == 2 and min(shape) > 1:
        raise DataError(f"{path} is in Fortran order (by column)", hint="write it with numpy.ascontiguousarray")
    n_tokens = 1
    for n in shape:
        n_tokens *= int(n)
    return dtype, file.tell(), n_tokens


def _document_ends(config: SourceConfig, files: Files, entry: dict[str, Any]) -> Int64s:
    """Read where the documents of one file end, in its tokens."""
    name = entry["name"] + str(config.document_ends)
    data = files.read([Range(name, 0, 8 * entry["documents"])])[0]
    ends = np.frombuffer(data, "<u8")
    if not ends.size or int(ends[-1]) != entry["tokens"] or (np.diff(ends.astype(np.int64)) < 0).any():
        raise DataError(
            f"{files.where}/{name} does not end with the {entry['tokens']:,} tokens of its file",
            hint="document_ends names files of u64 ends, in tokens: is it the right file? Else copy both again",
        )
    return ends.astype(np.int64)
