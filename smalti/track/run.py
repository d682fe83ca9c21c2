"""The run folder: opened for an attempt by the process that starts the ranks, joined by the ranks, or only read.

Guarantees: a folder belongs to one identity and has one writer at a time; every attempt has a number and a log folder;
files are written atomically; a folder without a step or a checkpoint may be reused by another identity. Local paths
only.
"""

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from smalti.base import store
from smalti.base.clock import utc_text
from smalti.base.errors import DataError, RetryableError, UserError, nearest
from smalti.config.fork import Fork, is_of_history, with_history
from smalti.config.identity import difference, placement_difference
from smalti.config.load import dump, load
from smalti.config.run import JobConfig, RunConfig
from smalti.track import owner
from smalti.track.attempts import attempts, log_folder
from smalti.track.checkpoints.names import complete, last_saved, step_of
from smalti.track.events import EventLog, read_events
from smalti.track.line_file import disk_trouble
from smalti.track.provenance import provenance
from smalti.track.sinks.jsonl import MetricsLog, read_metrics

STATES = ("starting", "running", "stopped", "interrupted", "failed", "done")
_MARKS = ("config.yaml", "metrics.jsonl", "events.jsonl", "config.json")
"""A path with one of these files is a run, or (the last) an exported model, rather than the name of a run."""

J = TypeVar("J", bound=JobConfig)


class RunFolder:
    """A run's folder, for one attempt (``attempt`` is None for a reader)."""

    def __init__(self, path: str | Path, attempt: int | None = None) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self._lock: int | None = None
        self._opened: int | None = None
        """Descriptor of the folder itself, which a rename does not change."""

    @classmethod
    def open(
        cls,
        config: JobConfig,
        origins: Mapping[str, str],
        *,
        argv: Sequence[str] | None = None,
        fork: Fork | None = None,
    ) -> Self:
        """Start the next attempt of the run that ``config`` describes, and create its folder if there is none.

        With ``fork`` the run's config becomes ``fork.after`` (``config`` is ignored). Raises UserError where the folder
        belongs to another identity (with a step or checkpoint) or where another process is training in it, and
        RetryableError where the disk is full, failing or read-only.
        """
        run = cls(config.run_folder)
        try:
            with disk_trouble(run.path):
                store.make_folder(run.path)
                run.take_lock()
                run._opened = os.open(run.path, os.O_RDONLY)
                if fork is not None:
                    run._fork(fork)
                    config = fork.after
                run._begin(run.with_history(config), provenance(sys.argv if argv is None else argv, origins))
                if fork is not None:
                    events = run.event_log()
                    events.write("forked", step=fork.at_step, changes=list(fork.changes))
                    events.close()
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def join(cls, path: str | Path, attempt: int) -> Self:
        """Return the folder for a rank of a running attempt; writes nothing."""
        run = cls(path, attempt)
        with suppress(OSError):  # a rank that writes nothing may not see the folder (yet)
            run._opened = os.open(run.path, os.O_RDONLY)
        return run

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the folder for reading, by its path or name in ``runs/``. Raises UserError where there is no run."""
        path = resolve(path)
        if not (Path(path) / "config.yaml").is_file():
            raise no_run(path)
        return cls(path)

    @overload
    def config(self) -> RunConfig: ...
    @overload
    def config(self, model: type[J]) -> J: ...
    def config(self, model: type[Any] = RunConfig) -> Any:
        """Return the config of the first attempt, or of the last fork (all attempts since share its identity)."""
        return load(model, str(self.path / "config.yaml")).config

    @overload
    def attempt_config(self, attempt: int) -> RunConfig: ...
    @overload
    def attempt_config(self, attempt: int, model: type[J]) -> J: ...
    def attempt_config(self, attempt: int, model: type[Any] = RunConfig) -> Any:
        """Return the config of one attempt, with its placement."""
        path = self.log_folder(attempt) / "config.yaml"
        return load(model, str(path)).config if path.exists() else self.config(model)

    def status(self) -> dict[str, Any]:
        """Return ``{"state", "reason", "attempt", "step", "heartbeat"}``.

        Empty before the first attempt, and where the file cannot be parsed: the next attempt rewrites it.
        """
        path = self.path / "status.json"
        try:
            status = store.read_json(path) if path.exists() else {}
        except DataError:
            return {}
        return status if isinstance(status, dict) else {}

    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the first attempt."""
        return dict(store.read_json(self.path / "provenance.json"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of ``metrics.jsonl``."""
        return read_metrics(self.path)

    def events(self) -> list[dict[str, Any]]:
        """Return all lines of ``events.jsonl``."""
        return read_events(self.path)

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts so far, ascending."""
        return attempts(self.path)

    def set_status(self, state: str, *, step: int | None = None, reason: str | None = None) -> None:
        """Write ``status.json``; call it regularly while training, as it holds the heartbeat. ``step`` None keeps it.

        Raises RetryableError where the disk is full, failing or read-only (the previous status remains), and where the
        folder was moved or deleted, which is not created again.
        """
        assert state in STATES, state
        self.require_in_place()
        if step is None:
            step = self.status().get("step")
        value = {
            "state": state,
            "reason": reason,
            "attempt": self.attempt,
            "step": step,
            "heartbeat": utc_text(),
            "process": os.getpid(),
        }
        with disk_trouble(self.path / "status.json"):
            store.write_json(self.path / "status.json", value)

    def event_log(self) -> EventLog:
        """Return the event log of this attempt, open for appending."""
        assert self.attempt is not None, "a reader writes no events"
        return EventLog(self.path, self.attempt)

    def metrics_log(self, *, resumed_step: int | None) -> MetricsLog:
        """Return the metrics file, truncated after ``resumed_step`` (-1 for a start from the beginning)."""
        return MetricsLog(self.path, resumed_step=resumed_step)

    def log_folder(self, attempt: int | None = None) -> Path:
        """Return ``logs/attempt-N``."""
        number = self.attempt if attempt is None else attempt
        assert number is not None, "a reader names the attempt"
        return log_folder(self.path, number)

    def rank_log(self, rank: int) -> Path:
        """Return ``logs/attempt-N/rank-NNN.log``."""
        return self.log_folder() / f"rank-{rank:03d}.log"

    def saved_step(self) -> int | None:
        """Return the step of the newest complete checkpoint. Raises RetryableError where they cannot be listed."""
        return next(map(step_of, complete(self.checkpoints)), None)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.checkpoints / f"step-{step:08d}"

    def missing_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint if it was lost and training would resume from an older one.

        Raises UserError where no checkpoint is left.
        """
        self.require_checkpoints()
        last = last_saved(self.path)
        return None if last is None or (self.saved_step() or 0) >= last else str(self.checkpoint(last))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def with_history(self, config: J) -> J:
        """Return ``config``, as a recipe gives it, with the forks recorded in this folder."""
        if not (self.path / "config.yaml").exists() or self._is_unused():
            return config
        return with_history(config, self._stored(type(config)))

    def require_identity(self, config: JobConfig) -> None:
        """Raise UserError unless ``config`` has this folder's identity (a recipe may be edited while ranks start)."""
        self._same_identity(self._stored(type(config)), self.with_history(config))

    def require_free_or_same(self, config: JobConfig) -> None:
        """Raise UserError where ``open`` would: another identity, or lost checkpoints. Writes nothing."""
        if (self.path / "config.yaml").exists() and not self._is_unused():
            self.require_identity(config)
        if config.train.checkpoint.save_to is None:
            self.require_checkpoints()
        self._require_owner()

    def _require_owner(self) -> None:
        """Raise UserError where there are checkpoints without a config.yaml: any recipe would resume from them."""
        if self.saved_step() is not None and not (self.path / "config.yaml").exists():
            raise UserError(
                f"{self.checkpoints} has checkpoints, but there is no config.yaml beside it to identify their run",
                hint=f"bring {self.path / 'config.yaml'} back; or start another run: name=NEW_NAME",
            )

    def require_checkpoints(self) -> None:
        """Raise UserError where the run had a checkpoint and now has none, rather than restart it from step 0."""
        step = None if self.saved_step() is not None else last_saved(self.path)
        if step is not None:
            raise UserError(
                f"{self.checkpoints} has no complete checkpoint, but this run had one of step {step:,}",
                allowed="the checkpoints of the run, where it saved them",
                hint=f"mount or copy them back, then run the same command; or start at step 0 in another folder "
                f"(this one is not changed): name=NEW_NAME, or first: mv {self.path} {self.path}-old",
            )

    def require_in_place(self) -> None:
        """Raise RetryableError where the folder of this attempt was moved or deleted.

        A folder that has its name now is another one, and this attempt must not write to it.
        """
        if self._opened is None:
            return
        try:
            in_place = os.path.samestat(os.fstat(self._opened), os.stat(self.path))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise RetryableError(
                f"{self.path} was moved or deleted while the run was training",
                hint="if it was moved, 'smalti train FOLDER' resumes it there from its newest checkpoint",
            )

    def close(self) -> None:
        """Release the lock on the folder."""
        for file in (self._lock, self._opened):
            if file is not None:
                os.close(file)
        self._lock = self._opened = None

    def _begin(self, config: JobConfig, record: dict[str, Any]) -> None:
        stored = self.path / "config.yaml"
        self.attempt = max(self.attempts(), default=-1) + 1
        if stored.exists() and self._is_unused() and self._is_of_another(config):
            self._hand_over()
        if stored.exists():
            self._same_identity(self._stored(type(config)), config)
        if config.train.checkpoint.save_to is None:  # else rank 0 looks there
            self.require_checkpoints()
        self._require_owner()
        if not stored.exists():
            store.write_json(self.path / "provenance.json", record)
            store.write_text(
                stored, config_text(config)
            )  # last: a folder with a config is a run, and every run has a provenance
            self.log_folder().mkdir(parents=True, exist_ok=True)
        else:
            before = self._stored(type(config)).model_copy(update={"folder": config.folder})
            self.log_folder().mkdir(parents=True, exist_ok=True)
            store.write_json(self.log_folder() / "provenance.json", record)
            if placement_difference(before, config):
                store.write_text(self.log_folder() / "config.yaml", config_text(config))
        self.set_status("starting")

    def _fork(self, fork: Fork) -> None:
        """Replace the run's config by the fork's; earlier attempts keep the config that they ran under."""
        if difference(self._stored(RunConfig), fork.before) or self.saved_step() != fork.at_step:
            raise UserError(
                f"{self.path} was trained further while it was being forked",
                hint="run the same command again once it has ended",
            )
        text = (self.path / "config.yaml").read_text(encoding="utf-8")
        for number in self.attempts():
            path = self.log_folder(number) / "config.yaml"
            if not path.exists():
                store.write_text(path, text)
        store.write_text(self.path / "config.yaml", config_text(fork.after))

    def _is_unused(self) -> bool:
        """Return whether no attempt has recorded a step or saved a checkpoint."""
        if self.saved_step() is not None or last_saved(self.path) is not None:
            return False
        return not any(row.get("step") for row in self.metrics())

    def _is_of_another(self, config: JobConfig) -> bool:
        try:
            return bool(difference(self._stored(type(config)), config))
        except DataError:  # unreadable (another version or kind of training), and unused
            return True

    def _hand_over(self) -> None:
        """Free the folder for another identity: files of the old one move to the logs of its attempts."""
        attempts = self.attempts()
        for number in attempts:
            for name in ("config.yaml", "provenance.json"):
                shared = self.path / name
                copy = self.log_folder(number) / name
                if shared.exists() and not copy.exists():
                    store.write_text(copy, shared.read_text(encoding="utf-8"))
        for name in ("tokenizer", "trackers", "tb", "wandb"):
            if (self.path / name).is_dir() and attempts:
                (self.path / name).rename(self.log_folder(attempts[-1]) / f"{name}-{utc_text()}")
        (self.path / "config.yaml").unlink()

    def _stored(self, model: type[JobConfig]) -> JobConfig:
        try:
            return self.config(model)
        except UserError as error:
            raise DataError(
                f"{self.path}/config.yaml cannot be read, so the identity of the folder is unknown: {error.message}",
                hint="use another folder: name=NEW_NAME",
            ) from error

    def _same_identity(self, before: JobConfig, config: JobConfig) -> None:
        lines = difference(before, config)
        if lines:
            forked = any(map(is_of_history, lines))
            shown = "".join(f"\n  {line}" for line in lines if not is_of_history(line))
            raise UserError(
                f"{self.path} holds another run; what differs (there -> here):{shown}",
                allowed="the same identity (ranks, device, cadences and other placement may change)",
                hint=f"start a new run with name={config.name}-2, or undo the change to resume this one; "
                "--fork continues this run with the change, if only data, length or learning rate differ"
                + (f"; it was forked, and 'smalti train {self.path}' resumes it" if forked else ""),
            )

    def take_lock(self) -> None:
        """Lock the folder until ``close``. Raises UserError where another process is training in it."""
        self._lock = os.open(self.path / owner.FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = owner.pid_of(os.pread(self._lock, 32, 0).decode(errors="replace"))
            self.close()
            raise UserError(
                f"{self.path} is in use: process {pid} is training in it",
                allowed="one 'smalti train' for each run folder",
                hint="wait for it, stop it, or start another run with name=NEW_NAME",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, owner.note(os.getpid()).encode(), 0)


def config_text(config: JobConfig) -> str:
    """Return the text of a config for the run folder: without ``folder``, which is its location."""
    return dump(config.model_copy(update={"folder": None}))


def resolve(run: str | Path, *, runs: str | Path = "runs") -> Path:
    """Return the folder of a run given by its path or by its name in ``runs``; any other path unchanged."""
    path = Path(run)
    named = Path(runs) / run
    taken = any((path / name).is_file() for name in _MARKS)
    return named if not taken and (named / "config.yaml").is_file() else path


def no_run(path: str | Path) -> DataError:
    """Return the error for a path that is not a run folder, with a hint of the nearest run."""
    path = Path(path)
    return DataError(
        f"'{path}' is not a run folder: it has no config.yaml" if path.exists() else f"there is no run folder '{path}'",
        allowed="a folder that 'smalti train' has written",
        hint=runs_beside(path) or "smalti runs ls FOLDER",
    )


def runs_beside(path: Path) -> str | None:
    """Return a hint with the nearest run name, or the runs that exist beside ``path``."""
    parent = path.parent if path.parent.is_dir() and path.parent != Path() else Path("runs")
    names = sorted(entry.parent.name for entry in parent.glob("*/config.yaml"))
    close = nearest(path.name, names)
    if close is not None:
        return f"did you mean '{parent / close}'?"
    return f"runs there: {', '.join(str(parent / name) for name in names[:8])}" if names else None
