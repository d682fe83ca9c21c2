"""Keeps local files open, with one limit for the process; no file is closed while a thread reads it.

A data set may have 45,000 files, a process often 1,024 descriptors. The files that were opened first are released; a
released file is closed when no thread uses it.
"""

import errno
import os
import resource
import threading
import weakref
from collections import deque
from typing import Any, Generic, TypeVar

from smalti.base.errors import UserError

K = TypeVar("K")

_PART, _LEAST = 4, 16
"""A quarter of the descriptors that the process may have: sockets, logs and libraries need some too."""


class OpenFile:
    """A descriptor, closed when nobody holds it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        """Raises OSError; UserError where the process has no descriptor left."""
        self.descriptor = -1
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self.descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _give_way(0)
            try:
                self.descriptor = os.open(path, flags)
            except OSError as again:
                raise _none_left(path, again) from again

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class OpenFiles(Generic[K]):
    """Those of one folder, by a key of its owner. ``by_key.get`` needs no lock."""

    def __init__(self) -> None:
        self.by_key: dict[K, OpenFile] = {}

    def keep(self, key: K, opened: OpenFile) -> None:
        """Keep a file open, until others need its place."""
        with _lock:
            if key not in self.by_key:
                self.by_key[key] = opened
                _kept.append((weakref.ref(self), key))
        _give_way(max(_LEAST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _PART))

    def close(self) -> None:
        """Let go of all."""
        with _lock:
            self.by_key.clear()
            others = [entry for entry in _kept if entry[0]() not in (self, None)]
            _kept.clear()
            _kept.extend(others)


_kept: "deque[tuple[weakref.ref[OpenFiles[Any]], Any]]" = deque()
"""What all keep open, the oldest first."""
_lock = threading.Lock()


def _give_way(most: int) -> None:
    """Let go of the oldest above so many."""
    with _lock:
        while len(_kept) > most:
            reference, key = _kept.popleft()
            owner = reference()
            if owner is not None:
                owner.by_key.pop(key, None)


def _none_left(path: str, error: OSError) -> UserError:
    if error.errno == errno.ENFILE:
        return UserError(f"{path} cannot be opened: this machine has as many files open as it may", hint="fs.file-max")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UserError(
        f"{path} cannot be opened: this process has all its {most:,} descriptors in use",
        hint="ulimit -n 65536, and start again",
    )
