"""Which checkpoints of a folder are kept: deletes old ones, and sets those of a rejected future aside."""

import os
import shutil
from pathlib import Path

from smalti.track.checkpoints.names import best, complete, step_of


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest ``keep`` up to ``step``, and the best; newer ones were not written by this attempt."""
    protected = best(folder)
    for old in [name for name in complete(folder) if step_of(name) <= step][keep:]:
        if step_of(old) == protected:
            continue
        if (folder / old).is_symlink():  # its target may belong to another run
            (folder / old).unlink()
            continue
        (folder / old / "COMPLETE").unlink()
        shutil.rmtree(folder / old)


def set_aside_newer(path: str | Path) -> list[str]:
    """Rename the checkpoints beside ``path`` that are newer to ``rejected-step-...``, and return their new paths.

    They are damaged, or they would have been chosen. Training continues from ``path`` and will write those steps again.
    """
    folder = Path(path).parent
    moved = []
    for name in complete(folder):
        if step_of(name) > step_of(path):
            aside = folder / f"rejected-{name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder / name, aside)
            moved.append(str(aside))
    return moved
