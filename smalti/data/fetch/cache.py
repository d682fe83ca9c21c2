"""A cache of byte ranges in a local folder, shared by the ranks of a node: a file for each range, no lock, no index.

A block's name is a digest of data set, file and range, so equal blocks of several ranks have equal bytes; writes are
atomic. A block that fails its checksum is a miss. Only blocks in the subfolder ``smalti-blocks``, created by Smalti,
are ever removed. A full or read-only disk disables writing, with one warning.
"""

import os
import re
import threading
import time
from contextlib import suppress
from hashlib import sha256

from smalti.base import log
from smalti.base.disk import reason
from smalti.base.hashing import xxh3
from smalti.data.fetch.files import Range

_FOLDER = "smalti-blocks"
_MARKER = "MADE-BY-SMALTI"
_MAGIC = b"smaltib1"
_HEAD_BYTES = 24
_BLOCK = re.compile(r"[0-9a-f]{40}\.block")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9]+\.tmp")
_STALE_S = 3600.0
_SUBFOLDERS = 256
_GROUP_BYTES = 64 << 20
_SCANS = 32
"""A group is trimmed when this process has written 1 / _SCANS of its bytes; the cache may be larger by as much."""


class BlockCache:
    """The cache in ``folder``. ``data``: digest of the data set, so that data sets cannot be confused."""

    def __init__(self, folder: str, cache_bytes: int, data: str) -> None:
        self._root = os.path.join(folder, _FOLDER)
        self._data = data
        groups = min(_SUBFOLDERS, max(1, cache_bytes // _GROUP_BYTES))
        self._groups = 1 << (groups.bit_length() - 1)
        self._group_bytes = cache_bytes // self._groups
        self._written = [self._group_bytes] * self._groups
        self._can_read = True
        self._can_write = True
        self._claim(folder)

    def get(self, wanted: Range) -> memoryview | None:
        """Return a cached range, or None."""
        if not self._can_read:
            return None
        path = self._path(wanted)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return None
        payload = memoryview(content)[_HEAD_BYTES:]
        if len(payload) == wanted.length and content[:_HEAD_BYTES] == _head(payload):
            return payload
        self.drop(wanted)
        return None

    def put(self, wanted: Range, data: memoryview) -> None:
        """Store a range."""
        if not self._can_write:
            return
        path = self._path(wanted)
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name.removesuffix('.block')}.{os.getpid()}{threading.get_ident()}.tmp")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(_head(data))
                file.write(data)
            os.replace(temporary, path)
            self._wrote(name, len(data) + _HEAD_BYTES)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            self._can_write = False
            log.get("data").warning(
                "cannot write to the cache %s: %s; continuing without writing to it",
                self._root,
                reason(error, self._root),
            )

    def drop(self, wanted: Range) -> None:
        """Remove a range that failed a check."""
        with suppress(OSError):
            os.unlink(self._path(wanted))

    def _path(self, wanted: Range) -> str:
        key = f"{self._data}\0{wanted.name}\0{wanted.start}\0{wanted.length}"
        name = sha256(key.encode()).hexdigest()[:40]
        return os.path.join(self._root, name[:2], f"{name}.block")

    def _claim(self, folder: str) -> None:
        """Create the subfolder, or check that Smalti created it; otherwise disable the cache."""
        marker = os.path.join(self._root, _MARKER)
        try:
            os.makedirs(folder, exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(self._root)
            if not os.path.exists(marker):
                if set(os.listdir(self._root)) - {_MARKER}:  # another rank may have just written the marker
                    self._can_read = self._can_write = False
                    log.get("data").warning("%s was not created by Smalti; the cache is disabled", self._root)
                    return
                with open(marker, "w", encoding="utf-8") as file:
                    file.write("Blocks that Smalti has read from a store. The folder may be removed at any time.\n")
        except OSError as error:
            self._can_write = False
            self._can_read = os.path.exists(marker)
            log.get("data").warning(
                "cannot create the cache %s: %s; continuing without writing to it",
                self._root,
                reason(error, self._root),
            )

    def _wrote(self, name: str, n_bytes: int) -> None:
        group = int(name[:2], 16) % self._groups
        self._written[group] += n_bytes
        if self._written[group] > self._group_bytes // _SCANS:
            self._written[group] = 0
            self._trim(group)

    def _trim(self, group: int) -> None:
        """Remove the oldest blocks of a group until it fits its limit, and temporary files of killed processes."""
        blocks: list[tuple[float, int, str]] = []
        for number in range(group, _SUBFOLDERS, self._groups):
            with suppress(FileNotFoundError), os.scandir(os.path.join(self._root, f"{number:02x}")) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        blocks += _block_entry(entry)
        total = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if total <= self._group_bytes:
                return
            with suppress(FileNotFoundError):  # another rank has removed it
                os.unlink(path)
            total -= size


def _block_entry(entry: "os.DirEntry[str]") -> list[tuple[float, int, str]]:
    """Return [(modification time, size, path)] of a block, [] for other files; removes stale temporary files."""
    if not entry.is_file(follow_symlinks=False):
        return []
    if _BLOCK.fullmatch(entry.name):
        status = entry.stat(follow_symlinks=False)
        return [(status.st_mtime, status.st_size, entry.path)]
    if _TEMPORARY.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S:
        os.unlink(entry.path)
    return []


def _head(payload: memoryview) -> bytes:
    return _MAGIC + len(payload).to_bytes(8, "little") + xxh3(payload).to_bytes(8, "little")
