"""Decompresses whole shards, never beyond the expected size."""

import bz2
import io
from collections.abc import Callable
from typing import Any

from smalti.base.errors import DataError, SmaltiError, missing_extra

_CHUNK_BYTES = 1 << 20


def decompress(data: bytes | memoryview, compression: str, n_bytes: int, path: str) -> bytes:
    """Return ``data`` decompressed. Raises DataError, naming ``path``, unless the result has exactly ``n_bytes``."""
    name = compression.partition(":")[0]
    try:
        result = _DECOMPRESS[name](data, n_bytes)
    except SmaltiError:
        raise
    except Exception as error:  # each package raises its own exceptions
        raise DataError(f"{path} cannot be decompressed ({name}): {error}", hint="copy it again") from error
    if len(result) != n_bytes:
        size = f"more than {n_bytes:,}" if len(result) > n_bytes else f"{len(result):,}"
        raise DataError(f"{path} decompresses to {size} bytes, its index says {n_bytes:,}", hint="copy it again")
    return result


def known_compressions() -> set[str]:
    """Return the names of the compressions, without a level."""
    return set(_DECOMPRESS)


def _in_chunks(read: Callable[[int], bytes], n_bytes: int) -> bytes:
    """Read at most one chunk beyond ``n_bytes``; memory is allocated for the data that is read, not for the size that
    an index claims."""
    parts = []
    size = 0
    while size <= n_bytes and (part := read(_CHUNK_BYTES)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _zstd(data: bytes | memoryview, n_bytes: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise missing_extra("zstandard", "mds", "a shard compressed with zstd", error) from error
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
        return _in_chunks(reader.read, n_bytes)


def _gz(data: bytes | memoryview, n_bytes: int) -> bytes:
    import gzip

    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return _in_chunks(file.read, n_bytes)


def _bz2(data: bytes | memoryview, n_bytes: int) -> bytes:
    with bz2.BZ2File(io.BytesIO(data)) as file:
        return _in_chunks(file.read, n_bytes)


def _br(data: bytes | memoryview, n_bytes: int) -> bytes:
    try:
        import brotli
    except ImportError as error:
        raise missing_extra("brotli", "mds", "a shard compressed with br", error) from error
    decoder: Any = brotli.Decompressor()
    parts = []
    size = 0
    chunk = bytes(data)
    while size <= n_bytes:
        part = decoder.process(chunk, output_buffer_limit=_CHUNK_BYTES)
        chunk = b""
        parts.append(part)
        size += len(part)
        if not part and decoder.can_accept_more_data():
            break
        if decoder.is_finished():
            break
    if size <= n_bytes and not decoder.is_finished():
        raise ValueError("it ends too early")
    return b"".join(parts)


def _snappy(data: bytes | memoryview, n_bytes: int) -> bytes:
    try:
        import snappy
    except ImportError as error:
        raise missing_extra("python-snappy", "mds", "a shard compressed with snappy", error) from error
    size = 0  # the decompressed size in its header, which the package would allocate
    for place, byte in enumerate(bytes(data[:5])):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    if size > n_bytes:
        raise ValueError(f"its header says {size:,} decompressed bytes, {n_bytes:,} are expected")
    return bytes(snappy.decompress(bytes(data)))


_DECOMPRESS: dict[str, Callable[[bytes | memoryview, int], bytes]] = {
    "zstd": _zstd,
    "gz": _gz,
    "bz2": _bz2,
    "br": _br,
    "snappy": _snappy,
}
