"""Digests: SHA-256 for identity, XXH3-64 for checksums of blocks, which are checked on every read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """Return the hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Return the hex SHA-256 of a local file, read in 1 MiB chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


xxh3_stream = xxhash.xxh3_128
"""``xxh3_stream()``: XXH3-128 of data in parts, by ``update`` and ``hexdigest``; not cryptographic."""


def xxh3_file(path: str | Path) -> str:
    """Return the hex XXH3-128 of a local file, read in 1 MiB chunks."""
    digest = xxh3_stream()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value in canonical form (sorted keys, no spaces): equal values, equal digests."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


def xxh3(data: bytes | memoryview, seed: int = 0) -> int:
    """Return the XXH3-64 of ``data`` as an unsigned integer, with a seed (u64). About 20 GB/s; not cryptographic."""
    return xxhash.xxh3_64_intdigest(data, seed)


xxh3_digest = xxhash.xxh3_64_digest
"""``xxh3_digest(data, seed)``: the same as 8 bytes, big-endian, with a seed (u64)."""
