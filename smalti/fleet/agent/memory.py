"""Shared memory for copies of the state of a run (``train.checkpoint.peer_copies``): it outlives the ranks.

The agent owns a folder in ``/dev/shm``, which the ranks fill, and removes it at its end. It holds a lock on the folder,
which the kernel releases however the agent ends; a folder without one is removed by the next agent of the same user.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smalti.base.errors import UserError
from smalti.base.units import format_bytes
from smalti.config.run import RunConfig
from smalti.cost.checkpoint import checkpoint_bytes
from smalti.cost.memory.per_rank import peer_copies

SHARED = Path("/dev/shm")


def require_room(config: RunConfig) -> None:
    """Raise UserError where this machine has no shared memory, or too little for the copies of a run.

    What killed agents have left is removed first.
    """
    remove_leftovers()
    if config.train.checkpoint.peer_copies is None:
        return
    require_free(memory_bytes(config))


def memory_bytes(config: RunConfig) -> int:
    """Return the shared memory that copies of a run take on a node; 0 without any."""
    nodes = config.train.nodes
    return peer_copies(config) * checkpoint_bytes(config) // (1 if nodes is None else nodes.count)


def free_bytes() -> int:
    """Return the free bytes of shared memory of this machine."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0


def require_free(needed_bytes: int) -> None:
    """Raise UserError where this machine has less shared memory."""
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
    if free is None or free < needed_bytes:
        has = "this machine has no /dev/shm" if free is None else f"/dev/shm has {format_bytes(free)} free"
        raise UserError(
            f"train.checkpoint.peer_copies needs {format_bytes(needed_bytes)} of shared memory on each node for copies "
            f"of the state; {has}",
            allowed="Linux, with so much shared memory",
            hint="mount -o remount,size=..., or docker run --shm-size=...; or remove train.checkpoint.peer_copies",
        )


@contextmanager
def peer_memory(config: RunConfig) -> Iterator[Path | None]:
    """Context manager: an empty folder for the copies of a run; None where the config asks for none."""
    if config.train.checkpoint.peer_copies is None:
        yield None
        return
    with owned_folder() as folder:
        yield folder


@contextmanager
def owned_folder() -> Iterator[Path]:
    """Context manager: an empty folder of shared memory, private, locked, and removed at the end."""
    folder, lock = _make_locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> None:
    """Remove the folders of this user's agents that were killed."""
    for folder in SHARED.glob(f"{_prefix()}*"):
        with suppress(OSError):  # of a running agent, or just removed by another one
            lock = _open(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=SHARED))
        with suppress(FileNotFoundError):  # another agent has removed it before it was locked
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _prefix() -> str:
    return f"smalti-{os.getuid()}-"
