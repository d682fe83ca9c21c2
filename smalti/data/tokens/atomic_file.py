"""A file that appears under its name when it is whole, or not at all."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from smalti.base.hashing import sha256_file


class _Closes(Protocol):
    def close(self) -> None: ...


class AtomicFile:
    """The temporary name of a file on its way; whoever writes it opens and closes ``temporary``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def finish(self) -> str:
        """Give the closed file its name; returns its SHA-256."""
        digest = sha256_file(self.temporary)
        os.replace(self.temporary, self.path)
        return digest

    def discard(self, file: _Closes) -> None:
        """Close ``file`` and remove what was written."""
        try:
            with suppress(OSError):  # the disk is full: what was still to be written is not wanted any more
                file.close()
        finally:
            self.temporary.unlink(missing_ok=True)
