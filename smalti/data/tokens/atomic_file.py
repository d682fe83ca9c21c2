"""A file that appears under its name only when it is complete."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from smalti.base.hashing import sha256_file


class _Closes(Protocol):
    def close(self) -> None: ...


class AtomicFile:
    """A file that is written as ``temporary`` and then renamed; the caller opens and closes ``temporary``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def finish(self) -> str:
        """Rename the closed file to its final name; returns its SHA-256."""
        digest = sha256_file(self.temporary)
        os.replace(self.temporary, self.path)
        return digest

    def discard(self, file: _Closes) -> None:
        """Close ``file`` and remove the temporary file."""
        try:
            with suppress(OSError):  # closing flushes, which fails on a full disk; the data is discarded anyway
                file.close()
        finally:
            self.temporary.unlink(missing_ok=True)
