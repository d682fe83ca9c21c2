"""The work folder of a deduplication: the result of each stage in a folder of its own, with a digest of its inputs.

Guarantees: a stage is complete or absent, so a run that was killed continues after the last complete one. A stage made
from other documents, another config or another format is made again, and so are all stages after one that was made.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.hashing import digest_json

FORMAT = 3
"""Raised with every change after which old stages would give other results."""

_RECORD = "stage.json"


class WorkFolder:
    """Runs stages in order, or reuses their results."""

    def __init__(self, path: Path, inputs: str, from_stage: str | None = None) -> None:
        """``inputs`` identifies the documents; ``from_stage`` and all stages after it are made again."""
        self.path = path
        self._digest = digest_json([FORMAT, inputs])
        self._from_stage = from_stage
        self._remake = False
        self._folders: list[Path] = []

    def stage(self, name: str, settings: dict[str, Any], make: Callable[[Path], None]) -> Path:
        """Return the folder of stage ``name``; ``make`` fills a new one unless a complete one has the same digest."""
        self._digest = digest_json([self._digest, name, settings])
        folder = self.path / name
        unfinished = self.path / f".{name}.tmp"
        self._folders += [folder, unfinished]
        self._remake = self._remake or name == self._from_stage
        if not self._remake and self._is_complete(folder):
            return folder
        self._remake = True
        for old in (folder, unfinished):
            _remove(old)
        unfinished.mkdir(parents=True)
        make(unfinished)
        store.write_json(unfinished / _RECORD, {"stage": name, "digest": self._digest, "settings": settings})
        os.replace(unfinished, folder)
        return folder

    def remove(self) -> None:
        """Remove the results of all stages, and the work folder if nothing else is in it."""
        for folder in self._folders:
            _remove(folder)
        with suppress(OSError):  # not empty
            self.path.rmdir()

    def _is_complete(self, folder: Path) -> bool:
        # The record is written last and the folder renamed after it.
        path = folder / _RECORD
        return path.exists() and store.read_json(path).get("digest") == self._digest


def _remove(folder: Path) -> None:
    # The record first: a kill in between must not leave half a stage that looks complete.
    (folder / _RECORD).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
