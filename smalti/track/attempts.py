"""The attempts of a run: a folder ``logs/attempt-N`` each. Other entries in ``logs/`` are ignored."""

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import SmaltiError

if TYPE_CHECKING:
    from smalti.track.run import RunFolder

_NAME = re.compile(r"attempt-(\d+)")


def log_folder(run: Path, attempt: int) -> Path:
    """Return the folder ``logs/attempt-N``."""
    return run / "logs" / f"attempt-{attempt}"


def attempts(run: Path) -> list[int]:
    """Return the numbers of the attempts so far, ascending."""
    matches = (_NAME.fullmatch(entry.name) for entry in (run / "logs").glob("attempt-*"))
    return sorted(int(match[1]) for match in matches if match)


def record_failure(folder: "RunFolder", error: Exception) -> None:
    """Set the status of the attempt to failed, unless its end is already recorded.

    Errors of the disk, or of a status that cannot be read, are ignored: they would hide ``error`` from the user.
    """
    with suppress(SmaltiError, OSError):
        status = folder.status()
        if status.get("attempt") == folder.attempt and status.get("state") in ("starting", "running"):
            before = "it did not start: " if status["state"] == "starting" else ""
            folder.set_status("failed", reason=before + str(error).partition("\n")[0])
