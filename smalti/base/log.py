"""One logger, to stderr and to a rank's own file; stdout is kept for data that a command answers with."""

import logging
import sys
from contextlib import suppress
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get(area: str) -> logging.Logger:
    """The logger of an area: ``get("train")``."""
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


class _File(logging.FileHandler):
    """A line that the disk does not take is lost: the fault that filled it is told elsewhere, without a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # it writes once more what it could not
            super().close()


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks ``sys.stderr`` up for each line: a live line, while shown, stands there and lets lines pass above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr
