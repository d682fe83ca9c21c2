"""The checkpoints that a command works on: those of a run folder, or the copies in an object store.

open_place("runs/demo")   open_place("s3://bucket/runs/demo")   ->  facts, named, verify, protect, remove, copy
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from smalti.base import store
from smalti.base.disk import writing
from smalti.base.errors import UserError
from smalti.base.objects import Requests
from smalti.track import checkpoint_commands as commands
from smalti.track.checkpoint_commands import Progress
from smalti.track.checkpoints import retention
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copy_retention import read_best, roles
from smalti.track.checkpoints.copying import copy_to, require_folder_of, require_one_run
from smalti.track.checkpoints.facts import CheckpointFacts, checkpoints
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, mark, unmark
from smalti.track.checkpoints.names import complete, folder_name, last_saved, step_of
from smalti.track.checkpoints.retention import stored_bytes
from smalti.track.run import RunFolder, resolve


class Place(Protocol):
    """Checkpoints by their names, ``step-00001000``. Every method raises UserError where one cannot be done."""

    url: str

    def facts(self) -> list[CheckpointFacts]:
        """Return what is known of each complete checkpoint, oldest first."""

    def named(self, steps: Sequence[str]) -> list[str]:
        """Return the names that these steps mean; all, oldest first, without a step."""

    def missing(self) -> str | None:
        """Return the place of the newest checkpoint if it was lost, as far as is known."""

    def verify(self, name: str, progress: Progress) -> str | None:
        """Return why a checkpoint is damaged; None where every byte matches its digest."""

    def protect(self, name: str, *, off: bool) -> None:
        """Protect a checkpoint from deletion, or end that."""

    def check_deletable(self, names: Sequence[str], *, force: bool) -> None:
        """Raise UserError where one of them may not be deleted."""

    def n_bytes(self, name: str) -> int:
        """Return the size of a checkpoint."""

    def remove(self, names: Sequence[str], *, force: bool) -> None:
        """Delete checkpoints. Raises UserError as ``check_deletable``."""

    def copy(self, name: str, target: str, progress: Progress) -> str:
        """Copy a checkpoint to a folder or a store, verified, and return the place of the copy."""


def open_place(run: str) -> Place:
    """Return the checkpoints of a run folder (or its name in ``runs/``), of a folder of copies, or those at a URL."""
    if not store.is_local(run):
        return OfStore(run)
    path = resolve(run)
    is_folder = not (path / "config.yaml").is_file() and bool(complete(path))
    return OfFolder(path) if is_folder else OfRun(RunFolder.read(run).path)


class OfRun:
    """The checkpoints of a run folder."""

    def __init__(self, run: Path) -> None:
        self.url = str(run)
        self._run = run

    def facts(self) -> list[CheckpointFacts]:
        """Return what the folder, events and metrics say."""
        return checkpoints(self._run)

    def named(self, steps: Sequence[str]) -> list[str]:
        """Return names by number, ``newest``, ``best`` or ``blessed``."""
        return [path.name for path in commands.named(self._run, steps)]

    def missing(self) -> str | None:
        """Return the newest checkpoint that events or metrics name, if it is newer than all that are there."""
        last = last_saved(self._run)
        newest = max(map(step_of, complete(self._run / "checkpoints")), default=-1)
        return None if last is None or newest >= last else str(self._path(folder_name(last)))

    def verify(self, name: str, progress: Progress) -> str | None:
        """Read all files, and mark the checkpoint as verified."""
        return commands.verify(self._path(name), progress)

    def protect(self, name: str, *, off: bool) -> None:
        """Write or remove the mark."""
        with writing(self._path(name)):
            (unmark if off else mark)(self._path(name), PROTECTED)

    def check_deletable(self, names: Sequence[str], *, force: bool) -> None:
        """Raise UserError also for those that a run which is training may need."""
        commands.check_deletable(self._run, [self._path(name) for name in names], force=force)

    def n_bytes(self, name: str) -> int:
        """Return the size of all files."""
        return stored_bytes(self._path(name))

    def remove(self, names: Sequence[str], *, force: bool) -> None:
        """Delete checkpoints; no training can start in the folder meanwhile."""
        commands.remove(self._run, [self._path(name) for name in names], force=force)

    def copy(self, name: str, target: str, progress: Progress) -> str:
        """Copy a checkpoint, and write an event."""
        return commands.copy(self._run, self._path(name), target, progress)

    def _path(self, name: str) -> Path:
        return self._run / "checkpoints" / name


class OfFolder(OfRun):
    """Checkpoints without their run: a folder to which they were copied."""

    def facts(self) -> list[CheckpointFacts]:
        """Return steps, sizes and marks."""
        return [
            _facts(name, role, bytes_=self.n_bytes(name), place=str(self._path(name)), here=True)
            for name, role in reversed(retention.roles(self._run).items())
        ]

    def named(self, steps: Sequence[str]) -> list[str]:
        """Return names by number or ``newest``."""
        names = complete(self._run)
        words = {"newest": next(iter(names), None)}
        return commands.steps_named(self.url, names, words, steps, f"smalti runs checkpoints {self.url}")

    def missing(self) -> str | None:
        """Return None: nothing says which there were."""
        return None

    def check_deletable(self, names: Sequence[str], *, force: bool) -> None:
        """Raise UserError for the newest, registered and protected ones, without ``force``."""
        role_of = retention.roles(self._run)
        for name in names if not force else ():
            commands.require_free(str(self._path(name)), role_of.get(name, ()))

    def remove(self, names: Sequence[str], *, force: bool) -> None:
        """Delete checkpoints."""
        self.check_deletable(names, force=force)
        for name in names:
            with writing(self._path(name)):
                retention.delete(self._path(name))

    def copy(self, name: str, target: str, progress: Progress) -> str:
        """Copy a checkpoint."""
        return copy_to(self._path(name), target)

    def _path(self, name: str) -> Path:
        return self._run / name


class OfStore:
    """The copies below the URL of a run: ``s3://bucket/runs/demo``. A store that fails raises, and is never empty."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._copies = Copies(url, Requests())

    def facts(self) -> list[CheckpointFacts]:
        """Return steps, sizes and marks: one small read and one listing for each copy."""
        return [
            _facts(name, role, bytes_=self.n_bytes(name), place=store.join(self.url, name), here=False)
            for name, role in reversed(roles(self._copies).items())
        ]

    def named(self, steps: Sequence[str]) -> list[str]:
        """Return names by number, ``newest``, ``best`` or ``blessed``."""
        names = self._copies.complete()
        words = {"newest": next(iter(names), None)}
        if "best" in steps:
            stored = read_best(self._copies)
            words["best"] = stored.name if stored is not None and stored.name in names else None
        if "blessed" in steps:
            words["blessed"] = next((name for name in names if BLESSED in self._copies.marks(name)), None)
        return commands.steps_named(self.url, names, words, steps, f"smalti runs checkpoints {self.url}")

    def missing(self) -> str | None:
        """Return None: nothing says which copies there were."""
        return None

    def verify(self, name: str, progress: Progress) -> str | None:
        """Read all parts, and compare the step and the config that the checkpoint has with those of the copy."""
        return self._copies.fault(name, self._reading(name, progress))

    def protect(self, name: str, *, off: bool) -> None:
        """Write or delete the mark."""
        self._copies.mark(name, PROTECTED, off=off)

    def check_deletable(self, names: Sequence[str], *, force: bool) -> None:
        """Raise UserError for the newest, best, newest blessed, registered and protected ones, without ``force``."""
        role_of = roles(self._copies)
        for name in names:
            if not force:
                commands.require_free(store.join(self.url, name), role_of[name])

    def n_bytes(self, name: str) -> int:
        """Return the size of the checkpoint."""
        return sum(file.bytes for file in self._copies.index(name).files)

    def remove(self, names: Sequence[str], *, force: bool) -> None:
        """Delete copies."""
        self.check_deletable(names, force=force)
        for name in names:
            self._copies.remove(name)

    def copy(self, name: str, target: str, progress: Progress) -> str:
        """Copy to a folder, which gets the checkpoint as a run has it, or to another store.

        Raises DataError where the target has checkpoints of another run.
        """
        if not store.is_local(target):
            others, config = Copies(target, Requests()), self._copies.index(name).config
            for newest in others.complete()[:1]:
                require_one_run(config, target, others.index(newest).config)
            return others.receive(self._copies, name, self._reading(name, progress)).url
        if (Path(target) / name).exists():
            raise UserError(f"{Path(target) / name} exists", hint="name another folder, or delete that one first")
        check = partial(require_folder_of, target=Path(target))
        return str(self._copies.fetch(step_of(name), target, check=check))

    def _reading(self, name: str, progress: Progress) -> Callable[[int], None]:
        total, done = self.n_bytes(name), 0

        def read(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress(name, done, total)

        return read


def _facts(name: str, role: Sequence[str], *, bytes_: int, place: str, here: bool) -> CheckpointFacts:
    """Return what is known of a checkpoint without its run. role: what keeps it."""
    kept_as = {each: each in role for each in ("newest", "last", "best", "every", "registered", "protected")}
    return CheckpointFacts(
        step=step_of(name), tokens=None, bytes=bytes_, block_s=None, saved=None, verified=None,
        blessed="yes" if "blessed" in role else None, parent=None, attempt=None, here=here, locations=(place,),
        **kept_as,
    )  # fmt: skip
