"""The checkpoints that a run folder has, and the last one it had, by names and ``COMPLETE`` marks.

A folder that cannot be listed raises, and is never reported as empty.
"""

import os
import re
from pathlib import Path

from smalti.base.errors import DataError, RetryableError
from smalti.base.store import read_json
from smalti.track.events import read_events
from smalti.track.sinks.jsonl import read_metrics

_NAME = re.compile(r"step-(\d+)")
BEST = "best"
"""File beside the checkpoints that names the best one (``train.checkpoint.best``)."""
PEER_MEMORY = "peer memory"
"""``source`` of the event ``resumed`` after a recovery from shared memory (``train.checkpoint.peer_copies``)."""


class NoneUsable(DataError):
    """There are checkpoints, and each is damaged."""


def complete(folder: str | Path) -> list[str]:
    """Return the names of the complete checkpoints in ``folder``, newest first; none where it does not exist.

    Raises RetryableError where the folder cannot be listed.
    """
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
        complete_names = [name for name in names if _exists(Path(folder) / name / "COMPLETE")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RetryableError(
            f"the checkpoints in {folder} cannot be listed: {error.strerror}",
            hint="repair the access to that folder, then run the same command again",
        ) from error
    return sorted(complete_names, key=step_of, reverse=True)


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` updates."""
    return f"step-{step:08d}"


def is_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: str | Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(Path(path).name.removeprefix("step-"))


def best(folder: str | Path) -> int | None:
    """Return the step of the best checkpoint in ``folder``; None where none was compared, or it is gone."""
    file = Path(folder) / BEST
    name = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return step_of(name) if _NAME.fullmatch(name) and _exists(Path(folder) / name / "COMPLETE") else None


def size_bytes(path: str | Path) -> float:
    """Return the size of a checkpoint's files from its manifest."""
    return float(sum(entry["bytes"] for entry in read_json(str(Path(path) / "manifest.json"))["files"]))


def last_saved(run: Path) -> int | None:
    """Return the step of the checkpoint that the run last saved or resumed from, even if it no longer exists.

    From its events, else ``checkpoints/latest``, else its metrics; None where it never had one.
    """
    kinds = ("checkpoint_saved", "resumed")
    events = [event for event in read_events(run) if event.get("event") in kinds and "step" in event]
    events = [event for event in events if event.get("source") != PEER_MEMORY]  # its copies end with the agent
    if events:
        return int(events[-1]["step"])
    latest = run / "checkpoints" / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if _NAME.fullmatch(name):
        return step_of(name)
    saves = [row["step"] for row in read_metrics(run) if "ckpt/save_s" in row and "step" in row]
    return int(saves[-1]) if saves else None


def _exists(path: Path) -> bool:
    """Return whether a path exists. Raises OSError where access is denied, unlike ``Path.exists``."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
