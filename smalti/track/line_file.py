"""JSON-lines files that survive a process that dies, or a disk that fills, during a write. Local files only.

Guarantees: when ``write`` returns the line is written whole, or not at all. Lines of several processes and threads are
never mixed (each write holds a lock). A line torn by a dying process is skipped when read and does not damage the next
one. A full or failing disk raises RetryableError.
"""

import errno
import fcntl
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.disk import reason
from smalti.base.errors import RetryableError

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


@contextmanager
def disk_trouble(path: str | Path) -> Iterator[None]:
    """Turn the errors of a full, failing or read-only disk into RetryableError; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        raise RetryableError(
            f"{path} could not be written: {reason(error, path)}",
            hint="free space or fix the disk there, then run the same command again",
        ) from error


class LineFile:
    """A JSON-lines file open for appending."""

    def __init__(self, path: str | Path) -> None:
        """Raises RetryableError where the disk takes no new file."""
        self.path = Path(path)
        self._lock = threading.Lock()  # the lock on the file excludes other processes, but not other threads
        with disk_trouble(path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line, whole or not at all. Numbers that are not finite become null, as JSON has none.

        Raises RetryableError where the disk is full, failing or read-only; earlier lines are unchanged then.
        """
        line = json.dumps({key: _finite(value) for key, value in values.items()}, ensure_ascii=False, allow_nan=False)
        with disk_trouble(self.path), self._lock, _locked(self._file):
            size = os.fstat(self._file).st_size
            separator = b"" if _ends_with_line(self._file, size) else b"\n"
            try:
                _write_all(self._file, separator + line.encode() + b"\n")
            except OSError:
                with suppress(OSError):  # if this fails too, the next write adds the missing newline
                    os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Close the file; further writes fail."""
        os.close(self._file)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; torn lines are skipped, a missing file is empty.

    Raises RetryableError where it cannot be read now.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                value = parse_line(text)
                if value is not None:
                    yield value
    except FileNotFoundError:
        return
    except OSError as error:
        raise RetryableError(
            f"{path} cannot be read: {error}", hint="restore the access to it, and try again"
        ) from error


def rewrite(path: str | Path, keep: Any) -> int:
    """Keep the lines for which ``keep(object)`` is true and drop torn ones; returns how many were dropped.

    Raises RetryableError where the disk is full, failing or read-only; the file is unchanged then.
    """
    if not os.path.exists(path):
        return 0
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    remaining = [
        text for text in lines if text.endswith("\n") and (value := parse_line(text)) is not None and keep(value)
    ]
    if len(remaining) != len(lines):
        with disk_trouble(path):
            store.write_text(path, "".join(remaining))
    return len(lines) - len(remaining)


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object of a line; None for a torn one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return value


def _ends_with_line(file: int, size: int) -> bool:
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _write_all(file: int, data: bytes) -> None:
    """Write all of ``data``: a disk that fills up writes a first part without an error, and raises for the rest."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Lock the file: truncating a torn line must not remove a line that another process wrote after it."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
