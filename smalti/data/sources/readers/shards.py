"""Reads shards from a store: plain ones by range; compressed ones are read whole and decompressed.

A compressed shard is checked against every hash in its index, read again if a check fails, and never decompressed
beyond the size in the index. At most ``CACHED_BYTES`` of decompressed shards are cached.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from smalti.base.errors import DataError
from smalti.data.fetch import Files, Range
from smalti.data.sources.readers.decompress import decompress

CACHED_BYTES = 512 << 20


@dataclass(frozen=True)
class StoredFile:
    """Name, size and hashes of a file by its index."""

    name: str
    n_bytes: int
    hashes: dict[str, str] = field(default_factory=dict)
    """Algorithm -> hex digest."""


@dataclass(frozen=True)
class Shard:
    """A shard. If it is compressed, ``raw`` has the size and hashes of the decompressed data."""

    raw: StoredFile
    compressed: StoredFile | None = None
    compression: str | None = None

    @property
    def file(self) -> StoredFile:
        """The file in the store."""
        return self.compressed or self.raw


Span = tuple[int, int, int]
"""(shard, first byte, end) in a decompressed shard."""


class StoredShards:
    """The shards of one folder. Thread-safe."""

    def __init__(self, files: Files, shards: Sequence[Shard]) -> None:
        self.files = files
        self.shards = shards
        self.any_compressed = any(shard.compressed for shard in shards)
        self._decompressed: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, shard: int) -> str:
        """Path of a shard, for messages."""
        return f"{self.files.where}/{self.shards[shard].file.name}"

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return the bytes of each span; plain shards are read together."""
        for shard, start, stop in spans:
            self._check(shard, start, stop)
        plain = [Range(self.shards[n].raw.name, a, b - a) for n, a, b in spans if self.shards[n].compressed is None]
        buffers = iter(self.files.read(plain) if plain else ())
        return [
            next(buffers) if self.shards[n].compressed is None else memoryview(self._whole(n))[a:b] for n, a, b in spans
        ]

    def verify(self, shard: int) -> None:
        """Read a shard whole and compare its size and all hashes of the index. Raises DataError."""
        file = self.shards[shard].file
        size = self.files.size(file.name)
        if size != file.n_bytes:
            raise DataError(
                f"{self.path(shard)} has {size:,} bytes, its index says {file.n_bytes:,}", hint="copy it again"
            )
        if self.shards[shard].compressed is not None:
            self._fetch(shard)
        elif file.hashes:
            data = self.files.read([Range(file.name, 0, file.n_bytes)])[0]
            wrong = wrong_hash(data, file.hashes)
            if wrong:
                raise DataError(f"{self.path(shard)} {wrong}", hint="copy it again")

    def close(self) -> None:
        """Clear the cache and close the files, which are opened again by the next read."""
        with self._lock:
            self._decompressed.clear()
        self.files.close()

    def _check(self, shard: int, start: int, stop: int) -> None:
        size = self.shards[shard].raw.n_bytes
        if not 0 <= start <= stop <= size:
            raise DataError(
                f"{self.path(shard)} has {size:,} bytes by its index, but its own header refers to bytes "
                f"{start:,} to {stop:,}",
                hint="the shard or its index is damaged: copy both again",
            )

    def _whole(self, shard: int) -> bytes:
        with self._lock:
            if shard in self._decompressed:
                self._decompressed.move_to_end(shard)
                return self._decompressed[shard]
        data = self._fetch(shard)
        with self._lock:
            self._decompressed[shard] = data
            while len(self._decompressed) > 1 and sum(map(len, self._decompressed.values())) > CACHED_BYTES:
                self._decompressed.popitem(last=False)
        return data

    def _fetch(self, shard: int) -> bytes:
        file = self.shards[shard].file
        wanted = Range(file.name, 0, file.n_bytes)
        try:
            return self._checked(shard, self.files.read([wanted])[0])
        except DataError:  # the transfer, not the stored file, may have damaged the data
            return self._checked(shard, self.files.read_again(wanted))

    def _checked(self, shard: int, compressed: memoryview) -> bytes:
        entry = self.shards[shard]
        assert entry.compressed is not None
        wrong = wrong_hash(compressed, entry.compressed.hashes)
        data = b""
        if not wrong:
            data = decompress(compressed, entry.compression or "", entry.raw.n_bytes, self.path(shard))
            wrong = wrong_hash(data, entry.raw.hashes)
            wrong = wrong and f"decompressed data {wrong}"
        if wrong:
            raise DataError(f"{self.path(shard)} {wrong}", hint="copy it again")
        return data


def wrong_hash(data: bytes | memoryview, hashes: dict[str, str]) -> str:
    """Describe the first hash that ``data`` does not match; empty if it matches all."""
    for name, expected in hashes.items():
        digest = hash_of(name, data)
        if digest != expected.lower():
            return f"has the {name} {digest}, its index says {expected}"
    return ""


def hash_of(name: str, data: bytes | memoryview) -> str:
    """Return the hex digest of ``data`` by one of ``known_hashes``."""
    make = getattr(xxhash if name in xxhash.algorithms_available else hashlib, name)
    return str(make(data).hexdigest())


def known_hashes() -> set[str]:
    """Return the names of the hash algorithms that can be checked."""
    plain = {name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_")}
    return plain | set(xxhash.algorithms_available)
