"""Which checkpoints of a folder are kept: deletes others, makes room on a full disk, sets a rejected future aside.

A checkpoint is deleted ``COMPLETE`` first, so that a kill in between leaves a folder that is no checkpoint. Such
leftovers are removed before the next save.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from smalti.base import log
from smalti.base.disk import room
from smalti.base.units import format_bytes
from smalti.config.durations import RunLength
from smalti.config.schema import split_duration
from smalti.config.train import KeepConfig
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, is_marked, is_registered
from smalti.track.checkpoints.names import BEST, best, complete, is_name, step_of

_TEMPORARY = re.compile(r"\.step-\d+\.tmp")
_TEMPORARY_FILE = re.compile(r"\.(?:latest|best)\.(\d+)\.tmp")
"""Of ``store.write_text``: the number is that of the process."""
_REJECTED = re.compile(r"rejected-(step-\d+)(\.\d+)?")

_GROWTH = 1.05
"""Size of a checkpoint relative to the one before, at most."""

Report = Callable[..., None]
"""Called with ``step=``, ``path=`` and ``reason=`` after a checkpoint was deleted."""


def _log(*, step: int, path: str, reason: str) -> None:
    log.get("checkpoint").debug("%s was deleted: %s", path, reason)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints ``prune`` keeps, besides the best, registered and protected ones."""

    last: int = 2
    """Number of the newest ones."""
    interval: Callable[[int], int] | None = None
    """Step -> number of the interval that it is in (``train.checkpoint.keep.every``); the first checkpoint of each
    interval but number 0 is kept. None: no such checkpoints."""
    blessed: int = 0
    """Number of the newest blessed ones. If above 0, the oldest one after them is kept too until it is blessed."""
    report: Report = _log

    @classmethod
    def of(cls, config: KeepConfig, length: RunLength, report: Report = _log, *, extra: int = 0) -> Self:
        """Return what the config of a run of ``length`` asks for, and ``extra`` more of the newest."""
        return cls(config.last + extra, _intervals(config.every, length), config.blessed, report)


def _intervals(every: str | None, length: RunLength) -> Callable[[int], int] | None:
    amount, unit = split_duration(every or "0step")
    if not amount:
        return None
    if unit == "tok":
        return lambda step: int(length.tokens(step) // amount)
    steps = max(1, length.step_at(every or ""))  # rounded as ``train.checkpoint.every``
    return lambda step: step // steps


# ---- after a save ---------------------------------------------------------------------------------------------------


def prune(folder: Path, step: int, keep: Keep | int) -> None:
    """Delete the checkpoints up to ``step`` that are not to be kept; newer ones were not written by this attempt.

    keep: a number keeps so many of the newest. Raises OSError where one cannot be deleted.
    """
    keep = keep if isinstance(keep, Keep) else Keep(keep)
    names = [name for name in complete(folder) if step_of(name) <= step]
    kept = kept_names(names, keep, lambda name: is_marked(folder / name, BLESSED))
    role_of = roles(folder)
    for name in reversed(names):
        if name not in kept and not {"best", "registered", "protected"} & set(role_of[name]):
            delete(folder / name)
            keep.report(step=step_of(name), path=str(folder / name), reason="train.checkpoint.keep")


def kept_names(names: Sequence[str], keep: Keep, is_blessed: Callable[[str], bool]) -> set[str]:
    """Return the names that ``keep`` asks for, of ``names`` (newest first)."""
    kept = {*names[: keep.last], *durable_names(names, keep)}
    if keep.blessed:
        blessed = [name for name in names if is_blessed(name)]
        kept |= set(blessed[: keep.blessed])
        kept |= set(names[: names.index(blessed[0])][-1:] if blessed else names[-1:])
    return kept


def durable_names(names: Sequence[str], keep: Keep) -> set[str]:
    """Return the first of each interval of ``train.checkpoint.keep.every``, of ``names`` (newest first)."""
    if keep.interval is None:
        return set()
    first = {keep.interval(step_of(name)): name for name in names}  # the oldest of each interval is set last
    return {name for number, name in first.items() if number > 0}


def roles(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return each complete checkpoint of a folder, newest first, with what keeps it; an empty tuple for the others.

    Of ``newest``, ``best``, ``registered``, ``protected`` and, for the newest of them, ``blessed``.
    """
    names = complete(folder)
    best_step = best(folder)
    blessed = next((name for name in names if is_marked(folder / name, BLESSED)), None)

    def of(name: str) -> tuple[str, ...]:
        has = {
            "newest": name == names[0],
            "best": step_of(name) == best_step,
            "blessed": name == blessed,
            "registered": is_registered(folder / name),
            "protected": is_marked(folder / name, PROTECTED),
        }
        return tuple(role for role, is_so in has.items() if is_so)

    return {name: of(name) for name in names}


def delete(path: Path) -> None:
    """Delete a checkpoint or what a kill has left of one; of a link only the link. Raises OSError."""
    if path.is_symlink():  # its target may belong to another run
        path.unlink()
        return
    (path / "COMPLETE").unlink(missing_ok=True)
    shutil.rmtree(path)


# ---- before a save --------------------------------------------------------------------------------------------------


def make_room(folder: Path, needed_bytes: float | None = None, *, report: Report = _log) -> None:
    """Remove leftovers; where the disk has less than ``needed_bytes`` free, warn and delete the oldest checkpoints.

    needed_bytes: None for the size of the newest checkpoint and 5 % more. Deleted are those that were rejected, then
    the oldest, until the save fits; never the newest, the newest blessed, the best, registered or protected ones.
    Nothing is deleted where all of them would not be enough. A warning comes already where the disk has room for this
    save only. Raises OSError where something cannot be deleted.
    """
    remove_leftovers(folder)
    newest = complete(folder)[:1]
    if not newest:  # nothing that could be deleted
        return
    needed = _GROWTH * stored_bytes(folder / newest[0]) if needed_bytes is None else needed_bytes
    free = shutil.disk_usage(folder).free
    if free >= 2 * needed:
        return
    warn = log.get("checkpoint").warning
    warn("%s; a checkpoint needs %s", room(folder), format_bytes(needed))
    candidates = _deletable(folder)
    if free >= needed or free + sum(stored_bytes(path, freed=True) for path in candidates) < needed:
        return
    for path in candidates:
        if shutil.disk_usage(folder).free >= needed:
            return
        delete(path)
        reason = f"disk space: a checkpoint needs {format_bytes(needed)}, {format_bytes(free)} were free"
        warn("%s was deleted: %s", path, reason)
        report(step=step_of(path.name.removeprefix("rejected-").partition(".")[0]), path=str(path), reason=reason)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves and deletions have left; none of them runs. Raises OSError."""
    whole = complete(folder)
    for name in os.listdir(folder) if folder.is_dir() else ():
        file = _TEMPORARY_FILE.fullmatch(name)
        if file and int(file[1]) != os.getpid():
            (folder / name).unlink(missing_ok=True)
        is_left = _TEMPORARY.fullmatch(name) or (is_name(name) and name not in whole)
        if is_left and not (folder / name).is_symlink():
            delete(folder / name)


def _deletable(folder: Path) -> list[Path]:
    """Return the checkpoints that may be deleted to make room: rejected ones, then the oldest first."""
    rejected = sorted(name for name in os.listdir(folder) if _REJECTED.fullmatch(name))
    names = [name for name in rejected if not _must_stay(folder / name)]
    names += [name for name, role in reversed(roles(folder).items()) if not role]
    return [folder / name for name in names if not (folder / name).is_symlink()]


def _must_stay(path: Path) -> bool:
    """Return whether a user or a registry wants a checkpoint to remain, whatever it is."""
    return is_marked(path, PROTECTED) or is_registered(path)


def stored_bytes(path: Path, *, freed: bool = False) -> int:
    """Return the size of the files below ``path``; freed: only of those whose space is freed by deleting them."""
    files = (file.lstat() for file in path.rglob("*") if not file.is_dir())
    return sum(file.st_size for file in files if not freed or file.st_nlink == 1)


# ---- at a resume ----------------------------------------------------------------------------------------------------


def set_aside_newer(path: str | Path) -> list[str]:
    """Rename the checkpoints beside ``path`` that are newer to ``rejected-step-...``, and return their new paths.

    They are damaged, or they would have been chosen. Training continues from ``path`` and will write those steps again.
    Marks move with them, and the best checkpoint is forgotten if it was one of them: none of it is said of the steps
    that are written again.
    """
    folder = Path(path).parent
    moved = []
    for name in complete(folder):
        if step_of(name) > step_of(path):
            moved.append(str(set_aside(folder / name)))
    file = folder / BEST
    name = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if is_name(name) and step_of(name) > step_of(path):
        file.unlink()
    return moved


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to ``rejected-step-...``, with a number where one has that name, and return its new path."""
    name = f"rejected-{path.name}"
    names = (name, *(f"{name}.{number}" for number in range(1, 10_000)))
    aside = next(path.with_name(each) for each in names if not os.path.lexists(path.with_name(each)))
    os.replace(path, aside)
    return aside
