"""litData's chunks of tokens (``TokensLoader``): each is a table of items followed by flat tokens.

litData's reader cuts each chunk into blocks and drops the rest; here the chunks form one array and nothing is dropped.
Block i of a chunk is the same tokens, at the chunk's beginning plus i * block_size. Items (the arrays that litData's
writer received) count as documents if they differ in length.
"""

import hashlib
from typing import Any

import numpy as np

from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.data.fetch import Files
from smalti.data.fetch.files import confined
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.file_names import map_files
from smalti.data.sources.readers.index import Index, SourceFolder, parsed_json
from smalti.data.sources.readers.sharded_source import Facts, FlatLayout, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredFile, StoredShards
from smalti.data.sources.source import Int64s

FILE_NAME = "index.json"
_NUMPY = {0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64"}
_TORCH = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"}
_DTYPES = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH | {20: "uint16"}}


def read_index(folder: SourceFolder) -> Index:
    """Read index.json and find out whether the items of the first chunk differ in length."""
    data = folder.index_file
    dtype, stored, tokens, items = _parsed(data, folder.files, None)
    ends = _item_ends(stored, 0, int(items[0]), int(tokens[0]), dtype)
    facts = {
        "varied": bool(np.unique(np.diff(ends, prepend=0)).size > 1),
        "compressed_bytes": [shard.compressed.n_bytes for shard in stored.shards if shard.compressed],
    }
    return Index("litdata", facts, {FILE_NAME: data})


def open_source(folder: SourceFolder, index: Index) -> ShardedSource:
    """Open the source from what ``read_index`` returned."""
    config = folder.config
    data = index.parts[FILE_NAME]
    dtype, stored, tokens, items = _parsed(data, folder.files, index.facts["compressed_bytes"])
    documents = None
    if index.facts["varied"]:
        documents = Documents(items, tokens, lambda n: _item_ends(stored, n, int(items[n]), int(tokens[n]), dtype))
    digest = digest_json({"form": "litdata", "index": hashlib.sha256(data).hexdigest()})
    facts = Facts(digest, "sizes (the format has no hashes)", config.vocab_size, config.eod_id)
    starts = (4 * (items + 2)).tolist()
    return ShardedSource(stored, FlatLayout(dtype, starts), tokens, facts, documents)


def _parsed(
    data: bytes, files: Files, compressed_bytes: list[int] | None
) -> tuple["np.dtype[Any]", StoredShards, Int64s, Int64s]:
    """Return dtype, chunks, and the tokens and items of each chunk.

    ``compressed_bytes``: sizes of compressed chunks, which the index lacks; None: they are requested here.
    """
    path = f"{files.where}/{FILE_NAME}"
    value = parsed_json(data, path)
    try:
        config = value["config"]
        chunks = value["chunks"]
        dtype = _dtype(config, path)
        compression = config["compression"]
        shards, tokens, items = [], [], []
        if compression is not None and compressed_bytes is None:
            compressed_bytes = map_files(files, files.size, [confined(str(chunk["filename"])) for chunk in chunks])
        for number, chunk in enumerate(chunks):
            n_tokens, n_items = (_whole(chunk[key], f"chunk {number}: {key}", path) for key in ("dim", "chunk_size"))
            size = 4 * (n_items + 2) + n_tokens * dtype.itemsize
            if compression is None and chunk["chunk_bytes"] != size:
                raise DataError(
                    f"{path}, chunk {number}: {n_items:,} items of {n_tokens:,} tokens take {size:,} bytes, "
                    f"the index says {chunk['chunk_bytes']}",
                    hint="the index is damaged: copy it again",
                )
            name = confined(str(chunk["filename"]))
            compressed = None
            if compressed_bytes:
                compressed = StoredFile(name, compressed_bytes[number])
            shards.append(Shard(StoredFile(name, size), compressed, compression))
            tokens.append(n_tokens)
            items.append(n_items)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise DataError(f"{path} is not an index of litData's: {error!r}", hint="copy it again") from error
    if not shards:
        raise DataError(f"{path} lists no chunks")
    return dtype, StoredShards(files, shards), np.array(tokens, np.int64), np.array(items, np.int64)


def _dtype(config: dict[str, Any], path: str) -> "np.dtype[Any]":
    if config["item_loader"] != "TokensLoader" or len(config["data_format"]) != 1:
        raise DataError(
            f"{path} is of {config['item_loader']} with {config['data_format']}",
            allowed="one array of tokens a sample, written for TokensLoader",
            hint="litdata.optimize(..., item_loader=TokensLoader())",
        )
    if config["encryption"] is not None:
        raise DataError(f"{path} is encrypted", hint="write the data set without encryption")
    kind, _, code = str(config["data_format"][0]).partition(":")
    name = _DTYPES.get(kind, {}).get(int(code)) if code.isdigit() else None
    if name is None:
        raise DataError(f"{path} is of {config['data_format'][0]}", allowed="arrays or tensors of whole numbers")
    level = config.get("compression_level") or "chunk"
    if config["compression"] is not None and (not str(config["compression"]).startswith("zstd") or level != "chunk"):
        raise DataError(
            f"{path} is compressed: {config['compression']} by {level}", allowed="nothing, or zstd of whole chunks"
        )
    return np.dtype(name).newbyteorder("<")


def _whole(value: Any, what: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise DataError(f"{path}, {what} is {str(value)[:40]}", allowed="a whole number below 2**32")
    return value


def _item_ends(stored: StoredShards, shard: int, n_items: int, n_tokens: int, dtype: "np.dtype[Any]") -> Int64s:
    """Read where the items of a chunk end, in its tokens."""
    data = stored.read([(shard, 0, 4 * (n_items + 2))])[0]
    head = np.frombuffer(data, "<u4").astype(np.int64)
    ends, rest = np.divmod(head[2:] - 4 * (n_items + 2), dtype.itemsize)
    starts_after_table = int(head[1]) == 4 * (n_items + 2)
    if int(head[0]) != n_items or not starts_after_table or rest.any() or (np.diff(ends, prepend=0) < 0).any():
        raise DataError(f"the table of items in {stored.path(shard)} does not match its index", hint="copy it again")
    if (int(ends[-1]) if n_items else 0) != n_tokens:
        raise DataError(f"{stored.path(shard)} ends at another token than its index says", hint="copy it again")
    return ends
