"""Keeps local files open within one limit for the process; no file is closed while a thread reads it.

A data set may have 45,000 files, while a process often has 1,024 descriptors. The files that were opened first are
released; a released file is closed when no thread uses it.
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

_LIMIT_DIVISOR = 4
"""At most this part of the process's descriptors: sockets, logs and libraries need some too."""
_MIN_OPEN = 16


class OpenFile:
    """A file descriptor that is closed with its last reference."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        """Raises OSError; UserError if the process has no descriptor left."""
        self.descriptor = -1
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self.descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _release_oldest(0)
            try:
                self.descriptor = os.open(path, flags)
            except OSError as again:
                raise _none_left(path, again) from again

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class OpenFiles(Generic[K]):
    """The open files of one folder, by keys that the caller chooses. ``by_key.get`` needs no lock."""

    def __init__(self) -> None:
        self.by_key: dict[K, OpenFile] = {}

    def keep(self, key: K, opened: OpenFile) -> None:
        """Keep a file open until the limit forces its release."""
        with _lock:
            if key not in self.by_key:
                self.by_key[key] = opened
                _opened.append((weakref.ref(self), key))
        _release_oldest(max(_MIN_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _LIMIT_DIVISOR))

    def close(self) -> None:
        """Release all files."""
        with _lock:
            self.by_key.clear()
            others = [entry for entry in _opened if entry[0]() not in (self, None)]
            _opened.clear()
            _opened.extend(others)


_opened: "deque[tuple[weakref.ref[OpenFiles[Any]], Any]]" = deque()
"""(owner, key) of all files that are kept open, oldest first."""
_lock = threading.Lock()


def _release_oldest(limit: int) -> None:
    """Release the oldest files until at most ``limit`` are kept open."""
    with _lock:
        while len(_opened) > limit:
            reference, key = _opened.popleft()
            owner = reference()
            if owner is not None:
                owner.by_key.pop(key, None)


def _none_left(path: str, error: OSError) -> UserError:
    if error.errno == errno.ENFILE:
        return UserError(
            f"{path} cannot be opened: the limit on open files of this machine is reached", hint="raise fs.file-max"
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UserError(
        f"{path} cannot be opened: this process uses all its {limit:,} descriptors",
        hint="ulimit -n 65536, and start again",
    )
