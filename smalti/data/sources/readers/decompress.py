"""Unpacking of whole shards, never beyond the size that is expected."""

import bz2
import io
from collections.abc import Callable
from typing import Any

from smalti.base.errors import DataError, SmaltiError, missing_extra

_CHUNK_BYTES = 1 << 20


def unpack(data: bytes | memoryview, compression: str, n_bytes: int, path: str) -> bytes:
    """``data`` unpacked. Raises DataError, naming ``path``, unless that gives exactly ``n_bytes``."""
    name = compression.partition(":")[0]
    try:
        found = _UNPACK[name](data, n_bytes)
    except SmaltiError:
        raise
    except Exception as error:  # each package has errors of its own
        raise DataError(f"{path} cannot be unpacked ({name}): {error}", hint="copy it again") from error
    if len(found) != n_bytes:
        size = f"more than {n_bytes:,}" if len(found) > n_bytes else f"{len(found):,}"
        raise DataError(f"{path} unpacks to {size} bytes, its index says {n_bytes:,}", hint="copy it again")
    return found


def known_compressions() -> set[str]:
    """Names, without a level."""
    return set(_UNPACK)


def _in_chunks(read: Callable[[int], bytes], n_bytes: int) -> bytes:
    """At most one chunk more than ``n_bytes``; memory is taken as data comes, not as an index promises."""
    parts, size = [], 0
    while size <= n_bytes and (part := read(_CHUNK_BYTES)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _zstd(data: bytes | memoryview, n_bytes: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise missing_extra("zstandard", "mds", "a shard packed with zstd", error) from error
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
        raise missing_extra("brotli", "mds", "a shard packed with br", error) from error
    decoder: Any = brotli.Decompressor()
    parts, size, given = [], 0, bytes(data)
    while size <= n_bytes:
        part = decoder.process(given, output_buffer_limit=_CHUNK_BYTES)
        given = b""
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
        raise missing_extra("python-snappy", "mds", "a shard packed with snappy", error) from error
    size = 0  # its own head says how large it gets, and that much would be allocated
    for place, byte in enumerate(bytes(data[:5])):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    if size > n_bytes:
        raise ValueError(f"it says that it unpacks to {size:,} bytes, {n_bytes:,} are expected")
    return bytes(snappy.decompress(bytes(data)))


_UNPACK: dict[str, Callable[[bytes | memoryview, int], bytes]] = {
    "zstd": _zstd,
    "gz": _gz,
    "bz2": _bz2,
    "br": _br,
    "snappy": _snappy,
}
