"""The work folder: the result of each stage in a folder of its own, bound to what it was made from.

Promises: a stage is there whole or not at all, so that a run that was killed goes on behind the last whole one; a stage
made from other documents, another config or another format is made anew, and so are all that follow one that was made.
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
"""Raised by every change after which old stages would give other results."""

_RECORD = "stage.json"


class Stages:
    """Runs stages in their order, or takes the result that is there."""

    def __init__(self, work: Path, inputs: str, from_stage: str | None = None) -> None:
        self.work = work
        self.reused: list[str] = []
        """Stages that were whole already."""
        self._digest = digest_json([FORMAT, inputs])
        self._from_stage = from_stage
        self._anew = False
        self._mine: list[Path] = []

    def stage(self, name: str, settings: dict[str, Any], make: Callable[[Path], None]) -> Path:
        """The folder of stage ``name``; ``make`` fills a new one where there is none that fits."""
        self._digest = digest_json([self._digest, name, settings])
        folder, making = self.work / name, self.work / f".{name}.tmp"
        self._mine += [folder, making]
        self._anew = self._anew or name == self._from_stage
        if not self._anew and self._whole(folder):
            self.reused.append(name)
            return folder
        self._anew = True
        for old in (folder, making):
            _remove(old)
        making.mkdir(parents=True)
        make(making)
        store.write_json(making / _RECORD, {"stage": name, "digest": self._digest, "settings": settings})
        os.replace(making, folder)
        return folder

    def remove(self) -> None:
        """Take the results of all stages away, and the folder where nothing else lies in it."""
        for folder in self._mine:
            _remove(folder)
        with suppress(OSError):  # others have something in it
            self.work.rmdir()

    def _whole(self, folder: Path) -> bool:
        # The record is written last and the folder renamed after it: a folder that has one is whole.
        path = folder / _RECORD
        return path.exists() and store.read_json(path).get("digest") == self._digest


def _remove(folder: Path) -> None:
    # The record first: a kill in between must not leave half a stage that looks whole.
    (folder / _RECORD).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
