"""Logging to stderr and to a file for each rank; stdout is reserved for the output of commands."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_TAIL_BYTES = 65_536
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get(area: str) -> logging.Logger:
    """Return the logger of an area: ``get("train")``."""
    return logging.getLogger(f"smalti.{area}")


def setup(level: str = "INFO", *, file: str | None = None, rank: int = 0) -> None:
    """Send log lines to stderr (rank 0 only) and, where given, to ``file`` (every rank). Safe to call again."""
    root = logging.getLogger("smalti")
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, logging.FileHandler):
            old.close()
    root.setLevel(level)
    root.propagate = False
    handlers: list[logging.Handler] = []
    if rank == 0:
        handlers.append(_Stderr())
    if file is not None:
        handlers.append(_File(file, encoding="utf-8"))
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)


def last_lines(path: str | Path, count: int) -> list[str]:
    """Return the last ``count`` lines of a file that are not empty; none where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


class _File(logging.FileHandler):
    """A file handler that drops lines on a full disk without a traceback; the full disk is reported elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # it flushes what it could not write
            super().close()


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that looks up ``sys.stderr`` for each line, which a live line replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr
