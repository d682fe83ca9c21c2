"""Marks of a checkpoint: small files in its folder, which its manifest does not list. Each holds the time it was made.

A mark belongs to this copy of the checkpoint: it moves with a rejected one, and is gone when the step is saved again.
"""

from collections.abc import Iterable
from pathlib import Path

from smalti.base import store
from smalti.base.clock import utc_text
from smalti.base.hashing import sha256_bytes

BLESSED = "BLESSED"
"""The run stayed healthy for ``train.checkpoint.keep.blessed_after`` beyond it."""
PROTECTED = "PROTECTED"
"""The user protected it: it is never deleted."""
REGISTERED = "REGISTERED"
"""A model registry has it (``smalti models``): it is never deleted. Followed by ``-`` and a digest of the path of the
registry, as several users may register the checkpoints of one run."""
VERIFIED = "VERIFIED"
"""Every file matched its digest (``smalti runs checkpoints verify``)."""


def mark(path: str | Path, name: str) -> None:
    """Mark the checkpoint at ``path``, with the present time."""
    store.write_text(Path(path) / name, utc_text() + "\n")


def unmark(path: str | Path, name: str) -> None:
    """Remove a mark, if there is one."""
    (Path(path) / name).unlink(missing_ok=True)


def marked_at(path: str | Path, name: str) -> str | None:
    """Return when the checkpoint at ``path`` was marked; None where it is not."""
    try:
        return (Path(path) / name).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def is_marked(path: str | Path, name: str) -> bool:
    """Return whether the checkpoint at ``path`` has this mark."""
    return marked_at(path, name) is not None


def registered_in(registry: Path) -> str:
    """Return the name of the mark of the registry whose database is at this path."""
    return f"{REGISTERED}-{sha256_bytes(str(registry.absolute()).encode())[:8]}"


def is_registered(path: str | Path) -> bool:
    """Return whether any registry has the checkpoint at ``path``."""
    return any(Path(path).glob(f"{REGISTERED}-*"))


def is_wanted(marks: Iterable[str]) -> bool:
    """Return whether a user or a registry wants what has these marks to remain, whatever it is."""
    return any(mark == PROTECTED or mark.startswith(f"{REGISTERED}-") for mark in marks)


def is_mark(name: str) -> bool:
    """Return whether a file of a checkpoint is a mark."""
    return name in (BLESSED, PROTECTED, VERIFIED) or name.startswith(f"{REGISTERED}-")
