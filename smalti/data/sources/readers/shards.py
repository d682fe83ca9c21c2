"""Shards in a store: plain ones are read by range, packed ones whole, and unpacked.

A packed shard is checked with every hash in its index, read again if it fails, and never unpacked beyond the size in
the index. At most ``KEPT_BYTES`` of unpacked shards are kept.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from smalti.base.errors import DataError
from smalti.data.fetch import Files, Range
from smalti.data.sources.readers.decompress import unpack

KEPT_BYTES = 512 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file, as an index describes it."""

    name: str
    n_bytes: int
    hashes: dict[str, str] = field(default_factory=dict)
    """Algorithm -> hex digest, both of the writer's choice."""


@dataclass(frozen=True)
class Shard:
    """A shard; where it is packed, ``raw`` is only a size and hashes."""

    raw: StoredFile
    packed: StoredFile | None = None
    compression: str | None = None

    @property
    def file(self) -> StoredFile:
        """What lies in the store."""
        return self.packed or self.raw


Span = tuple[int, int, int]
"""Shard, first byte, end: of the plain shard."""


class StoredShards:
    """The shards of one folder. Threads may share it."""

    def __init__(self, files: Files, shards: Sequence[Shard]) -> None:
        self.files, self.shards = files, shards
        self.any_packed = any(shard.packed for shard in shards)
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, shard: int) -> str:
        """For messages."""
        return f"{self.files.where}/{self.shards[shard].file.name}"

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of each span; plain shards are read together."""
        for shard, start, stop in spans:
            self._check(shard, start, stop)
        plain = [Range(self.shards[n].raw.name, a, b - a) for n, a, b in spans if self.shards[n].packed is None]
        found = iter(self.files.read(plain) if plain else ())
        return [next(found) if self.shards[n].packed is None else memoryview(self._whole(n))[a:b] for n, a, b in spans]

    def verify(self, shard: int) -> None:
        """Read a shard whole and compare its size and all hashes of the index. Raises DataError."""
        file = self.shards[shard].file
        found = self.files.size(file.name)
        if found != file.n_bytes:
            raise DataError(
                f"{self.path(shard)} has {found:,} bytes, its index says {file.n_bytes:,}", hint="copy it again"
            )
        if self.shards[shard].packed is not None:
            self._fetch(shard)
        elif file.hashes:
            data = self.files.read([Range(file.name, 0, file.n_bytes)])[0]
            wrong = wrong_hash(data, file.hashes)
            if wrong:
                raise DataError(f"{self.path(shard)} {wrong}", hint="copy it again")

    def close(self) -> None:
        """Forget what was unpacked and close the files; they open again when read."""
        with self._lock:
            self._unpacked.clear()
        self.files.close()

    def _check(self, shard: int, start: int, stop: int) -> None:
        size = self.shards[shard].raw.n_bytes
        if not 0 <= start <= stop <= size:
            raise DataError(
                f"{self.path(shard)} has {size:,} bytes by its index; what it says of itself leads to bytes "
                f"{start:,} to {stop:,}",
                hint="the shard or its index is damaged: copy both again",
            )

    def _whole(self, shard: int) -> bytes:
        with self._lock:
            if shard in self._unpacked:
                self._unpacked.move_to_end(shard)
                return self._unpacked[shard]
        data = self._fetch(shard)
        with self._lock:
            self._unpacked[shard] = data
            while len(self._unpacked) > 1 and sum(map(len, self._unpacked.values())) > KEPT_BYTES:
                self._unpacked.popitem(last=False)
        return data

    def _fetch(self, shard: int) -> bytes:
        file = self.shards[shard].file
        wanted = Range(file.name, 0, file.n_bytes)
        try:
            return self._checked(shard, self.files.read([wanted])[0])
        except DataError:  # a transfer can damage what lies intact in the store
            return self._checked(shard, self.files.read_again(wanted))

    def _checked(self, shard: int, packed: memoryview) -> bytes:
        entry = self.shards[shard]
        assert entry.packed is not None
        wrong = wrong_hash(packed, entry.packed.hashes)
        data = b""
        if not wrong:
            data = unpack(packed, entry.compression or "", entry.raw.n_bytes, self.path(shard))
            wrong = wrong_hash(data, entry.raw.hashes)
            wrong = wrong and f"unpacked {wrong}"
        if wrong:
            raise DataError(f"{self.path(shard)} {wrong}", hint="copy it again")
        return data


def wrong_hash(data: bytes | memoryview, hashes: dict[str, str]) -> str:
    """What a hash of the index finds wrong with ``data``; empty where all agree."""
    for name, expected in hashes.items():
        found = hash_of(name, data)
        if found != expected.lower():
            return f"has the {name} {found}, its index says {expected}"
    return ""


def hash_of(name: str, data: bytes | memoryview) -> str:
    """Hex digest by one of ``known_hashes``."""
    make = getattr(xxhash if name in xxhash.algorithms_available else hashlib, name)
    return str(make(data).hexdigest())


def known_hashes() -> set[str]:
    """Names of the hash algorithms that can be checked."""
    plain = {name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_")}
    return plain | set(xxhash.algorithms_available)
