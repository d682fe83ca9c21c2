"""Which checkpoints a run folder has, and which one it had last.

Promises: a folder that cannot be listed raises instead of being empty. Knows names and marks alone; ``dist.checkpoint``
writes, verifies and reads them.
"""

import os
import re
from pathlib import Path

from smalti.base.errors import RetryableError
from smalti.base.store import read_json
from smalti.track.events import read_events
from smalti.track.sinks.jsonl import read_metrics

_NAME = re.compile(r"step-(\d+)")


def complete(folder: str | Path) -> list[str]:
    """Names of the complete checkpoints in ``folder``, newest first; none where there is no such folder."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
        found = [name for name in names if _exists(Path(folder) / name / "COMPLETE")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RetryableError(
            f"the checkpoints in {folder} cannot be listed: {error.strerror}",
            hint="repair the access to that folder, then run the same command again",
        ) from error
    return sorted(found, key=step_of, reverse=True)


def is_name(name: str) -> bool:
    """Whether a folder of this name is the checkpoint of a step."""
    return _NAME.fullmatch(name) is not None


def step_of(path: str | Path) -> int:
    """The step of a checkpoint by its folder's name."""
    return int(Path(path).name.removeprefix("step-"))


def size_bytes(path: str | Path) -> float:
    """Bytes of a checkpoint's files, by its manifest."""
    return float(sum(entry["bytes"] for entry in read_json(str(Path(path) / "manifest.json"))["files"]))


def last_saved(run: Path) -> int | None:
    """The step of the checkpoint that the run last saved or resumed from, whether it is still there or not: by its
    events, else by ``checkpoints/latest``, else by its metrics. None: it never had one."""
    kinds = ("checkpoint_saved", "resumed")
    events = [event["step"] for event in read_events(run) if event.get("event") in kinds and "step" in event]
    if events:
        return int(events[-1])
    latest = run / "checkpoints" / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if _NAME.fullmatch(name):
        return step_of(name)
    saves = [row["step"] for row in read_metrics(run) if "ckpt/save_s" in row and "step" in row]
    return int(saves[-1]) if saves else None


def _exists(path: Path) -> bool:
    """As ``Path.exists``, but for a place that may not be looked into, which raises."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
