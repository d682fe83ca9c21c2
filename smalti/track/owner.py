"""The process that trains in a run folder, noted in the folder's lock file.

It says that a run was killed at once where the process was started on this machine, in this process namespace and since
the last boot. Elsewhere a reader has only the heartbeat.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from smalti.base.processes import identity, is_running

FILE_NAME = ".lock"


def note(pid: int) -> str:
    """Return the line of the lock file for a running process: its number, identity and place."""
    return f"{pid} {identity(pid)} {_place()}"


def pid_of(line: str) -> str:
    """Return the process number in a line of a lock file."""
    return next(iter(line.split()), "unknown")


def with_owner(folder: Path, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a run with the state ``killed`` where the process that trained it ended without one."""
    if status.get("state") not in ("starting", "running"):
        return status
    try:
        pid, process, place = (folder / FILE_NAME).read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # none, or one of an earlier version
        return status
    if place != _place() or is_running(int(pid), process):
        return status
    reason = f"process {pid} ended without recording why; the same command resumes the run"
    return status | {"state": "killed", "reason": reason}


def _place() -> str:
    """Return what processes must share to see each other."""
    if not sys.platform.startswith("linux"):
        return platform.node().replace(" ", "-")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
