"""What a user does with the checkpoints of a run folder, also while the run trains: find, verify, delete, copy."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from smalti.base import clock
from smalti.base.disk import writing
from smalti.base.errors import SmaltiError, UserError
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copying import copy_to
from smalti.track.checkpoints.marks import BLESSED, VERIFIED, is_marked, mark, unmark
from smalti.track.checkpoints.names import best, complete, folder_name, is_name, step_of
from smalti.track.checkpoints.retention import delete, roles
from smalti.track.events import EventLog
from smalti.track.run import RunFolder

Progress = Callable[[str, int, int], None]
"""Called with (name, bytes done, bytes in total)."""

_KEPT_WHILE_TRAINING = 2
"""Number of the newest checkpoints that are not deleted under a run that trains: it may need the second one too."""


def named(run: Path, steps: Sequence[str]) -> list[Path]:
    """Return the complete checkpoints of these steps, in this order; all of the run, oldest first, without a step.

    A step is a number, the name of its folder, ``newest``, ``best`` or ``blessed`` (the newest of them). Raises
    UserError where there is none.
    """
    folder = run / "checkpoints"
    names = complete(folder)
    words = {
        "newest": next(iter(names), None),
        "best": None if (best_step := best(folder)) is None else folder_name(best_step),
        "blessed": next((name for name in names if is_marked(folder / name, BLESSED)), None),
    }
    return [folder / name for name in steps_named(str(folder), names, words, steps, f"smalti runs checkpoints {run}")]


def steps_named(
    place: str, names: Sequence[str], words: Mapping[str, str | None], steps: Sequence[str], hint: str
) -> list[str]:
    """Return the checkpoints of ``names`` (newest first) that ``steps`` mean, oldest first without a step.

    words: other names of them, such as ``newest``. Raises UserError, with this hint, for a step that is not there.
    """
    chosen = [words.get(step, step if is_name(step) else _name(step)) for step in steps]
    for step, name in zip(steps, chosen, strict=True):
        if name not in names:
            raise UserError(
                f"{place} has no complete checkpoint '{step}'",
                allowed=", ".join([*(str(step_of(each)) for each in reversed(names)), *(w for w in words if words[w])]),
                hint=hint,
            )
    return [name for name in dict.fromkeys(chosen or reversed(names)) if name is not None]


def _name(step: str) -> str | None:
    return folder_name(int(step)) if step.isascii() and step.isdigit() else None


def verify(path: Path, progress: Progress) -> str | None:
    """Return why the checkpoint at ``path`` is damaged; None, and a mark with the time, where all files match.

    The mark is left out where the folder is read-only.
    """
    fault = manifest.fault(path, _reading(path, progress))
    with suppress(OSError):
        if fault is None:
            mark(path, VERIFIED)
        else:
            unmark(path, VERIFIED)
    return fault


def check_deletable(run: Path, paths: Sequence[Path], *, force: bool) -> None:
    """Raise UserError where one of the checkpoints may not be deleted.

    With ``force`` only those that a run which is training may need.
    """
    folder = RunFolder(run)
    is_training = _lock(folder) is not None
    folder.close()
    _check(run, paths, is_training=is_training, force=force)


def remove(run: Path, paths: Sequence[Path], *, force: bool) -> None:
    """Delete checkpoints and write an event for each; meanwhile no training can start in the folder.

    Raises UserError as ``check_deletable``, and DataError where the folder is read-only.
    """
    folder = RunFolder(run)
    with writing(run):
        is_training = _lock(folder) is not None
    try:
        _check(run, paths, is_training=is_training, force=force)
        for path in paths:
            with writing(path):
                delete(path)
            _write_event(folder, "checkpoint_deleted", step=step_of(path), path=str(path), reason="by command")
    finally:
        folder.close()


def copy(run: Path, path: Path, target: str, progress: Progress) -> str:
    """Copy a checkpoint to ``target`` (``copying.copy_to``), write an event, and return the place of the copy."""
    began_s = clock.now_s()
    place = copy_to(path, target, _reading(path, progress))
    size = sum(int(entry["bytes"]) for entry in manifest.listed(path)[0])
    seconds = round(clock.now_s() - began_s, 3)
    _write_event(RunFolder(run), "checkpoint_copied", step=step_of(path), url=place, bytes=size, seconds=seconds)
    return place


def _reading(path: Path, progress: Progress) -> Callable[[int], None]:
    """Return a function that takes the bytes of each file that was read and reports their sum."""
    total = sum(int(entry["bytes"]) for entry in manifest.listed(path)[0])
    done = 0

    def read(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(path.name, done, total)

    return read


def _lock(folder: RunFolder) -> UserError | None:
    """Lock a run folder; return the error where a process is training in it."""
    try:
        folder.take_lock()
    except UserError as error:
        return error
    return None


def _check(run: Path, paths: Sequence[Path], *, is_training: bool, force: bool) -> None:
    role_of = roles(run / "checkpoints")
    newest = list(role_of)[:_KEPT_WHILE_TRAINING] if is_training else []
    for path in paths:
        if path.name in newest:
            raise UserError(
                f"{path} cannot be deleted: the run is training and may have to resume from it",
                allowed=f"checkpoints older than the newest {_KEPT_WHILE_TRAINING}, while it trains",
                hint="stop the run first (Ctrl-C saves)",
            )
        if not force:
            require_free(str(path), role_of.get(path.name, ()))


def require_free(place: str, role: Sequence[str]) -> None:
    """Raise UserError where something keeps the checkpoint at ``place``."""
    if role:
        raise UserError(
            f"{place} is kept as {', '.join(role)}",
            allowed="checkpoints that are not the newest, best, newest blessed, registered or protected",
            hint=_hint(role),
        )


def _hint(role: Sequence[str]) -> str:
    if "registered" in role:
        return "'smalti models ls' names its versions, 'smalti models rm' removes one; --force deletes it nevertheless"
    return "--force deletes it; 'smalti runs checkpoints keep RUN STEP --off' ends a protection"


def _write_event(folder: RunFolder, kind: str, **fields: object) -> None:
    """Write an event of the newest attempt; none into a folder that takes no files, or on a full disk."""
    with suppress(OSError, SmaltiError):
        events = EventLog(folder.path, max(folder.attempts(), default=0))
        events.write(kind, **fields)
        events.close()
