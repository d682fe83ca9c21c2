"""The run folder: opened once for an attempt by whoever starts the ranks, joined by the ranks, read by everybody else.

Promises: one folder is one identity and has one writer at a time; every attempt has a number and a log folder; files
appear whole; a folder without a step and a checkpoint may change hands. Of checkpoints (``dist``) it knows the steps
only, of exports nothing. Local paths only.
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
from smalti.track.append import disk_trouble
from smalti.track.attempts import attempts, log_folder
from smalti.track.checkpoints import complete, last_saved, step_of
from smalti.track.events import EventLog, read_events
from smalti.track.provenance import provenance
from smalti.track.sinks.jsonl import MetricsLog, read_metrics

STATES = ("starting", "running", "stopped", "interrupted", "failed", "done")
_MARKS = ("config.yaml", "metrics.jsonl", "events.jsonl", "config.json")
"""A folder with one of these is a run, or (the last) an exported model, and is meant itself when it is named."""

J = TypeVar("J", bound=JobConfig)


class RunFolder:
    """One run's folder as seen by one attempt (``attempt`` is None for a reader)."""

    def __init__(self, path: str | Path, attempt: int | None = None) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self._lock: int | None = None
        self._opened: int | None = None
        """The folder itself, whatever its name becomes."""

    @classmethod
    def open(
        cls,
        config: JobConfig,
        origins: Mapping[str, str],
        *,
        argv: Sequence[str] | None = None,
        fork: Fork | None = None,
    ) -> Self:
        """Start the next attempt of the run that ``config`` describes, making its folder if there is none.

        With ``fork`` the run becomes its ``after`` (``config`` is not looked at), once nobody else trains in it.
        UserError where the folder belongs to another identity (unless nothing came of that: no step, no checkpoint),
        or where another process is training in it; RetryableError where the disk is full, failing or read-only.
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
        """The folder as a rank of a running attempt has it; nothing is written."""
        run = cls(path, attempt)
        with suppress(OSError):  # ranks that write nothing may not see it (yet)
            run._opened = os.open(run.path, os.O_RDONLY)
        return run

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The folder for a reader, by its path or its name in ``runs/``; UserError where there is no run."""
        path = resolve(path)
        if not (Path(path) / "config.yaml").is_file():
            raise UserError(
                f"{path} is not a run folder: it has no config.yaml",
                allowed="a folder that 'smalti train' has written",
                hint=runs_beside(Path(path)),
            )
        return cls(path)

    @overload
    def config(self) -> RunConfig: ...
    @overload
    def config(self, model: type[J]) -> J: ...
    def config(self, model: type[Any] = RunConfig) -> Any:
        """The config of the first attempt, or of the last fork (identity is that of all attempts since)."""
        return load(model, str(self.path / "config.yaml")).config

    @overload
    def attempt_config(self, attempt: int) -> RunConfig: ...
    @overload
    def attempt_config(self, attempt: int, model: type[J]) -> J: ...
    def attempt_config(self, attempt: int, model: type[Any] = RunConfig) -> Any:
        """The config of one attempt, with the placement that it ran under."""
        own = self.log_folder(attempt) / "config.yaml"
        return load(model, str(own)).config if own.exists() else self.config(model)

    def status(self) -> dict[str, Any]:
        """``{"state", "reason", "attempt", "step", "heartbeat"}``; empty before the first attempt, and where the file
        cannot be parsed: the next attempt writes it anew."""
        path = self.path / "status.json"
        try:
            found = store.read_json(path) if path.exists() else {}
        except DataError:
            return {}
        return found if isinstance(found, dict) else {}

    def provenance(self) -> dict[str, Any]:
        """What the run was first made by."""
        return dict(store.read_json(self.path / "provenance.json"))

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of ``metrics.jsonl``."""
        return read_metrics(self.path)

    def events(self) -> list[dict[str, Any]]:
        """All lines of ``events.jsonl``."""
        return read_events(self.path)

    def attempts(self) -> list[int]:
        """Numbers of the attempts so far, rising."""
        return attempts(self.path)

    def set_status(self, state: str, *, step: int | None = None, reason: str | None = None) -> None:
        """Write ``status.json``; call it regularly while training (it holds the heartbeat). ``step`` None keeps it.

        RetryableError where the disk is full, failing or read-only, the status before stands then; and where the folder
        was moved or deleted, which is not made again.
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
        """The event log of this attempt, open for appending."""
        assert self.attempt is not None, "a reader writes no events"
        return EventLog(self.path, self.attempt)

    def metrics_log(self, *, resumed_step: int | None) -> MetricsLog:
        """The metrics file, cut after ``resumed_step`` (-1 for a start from the beginning)."""
        return MetricsLog(self.path, resumed_step=resumed_step)

    def log_folder(self, attempt: int | None = None) -> Path:
        """``logs/attempt-N``."""
        number = self.attempt if attempt is None else attempt
        assert number is not None, "a reader names the attempt"
        return log_folder(self.path, number)

    def rank_log(self, rank: int) -> Path:
        """``logs/attempt-N/rank-NNN.log``."""
        return self.log_folder() / f"rank-{rank:03d}.log"

    def saved_step(self) -> int | None:
        """The step of the newest complete checkpoint of any attempt. RetryableError where they cannot be listed."""
        return next(map(step_of, complete(self.checkpoints)), None)

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` steps."""
        return self.checkpoints / f"step-{step:08d}"

    def missing_checkpoint(self) -> str | None:
        """Where the newest checkpoint was, if it is not there any more and training would go on from an older one;
        UserError where there is none left."""
        self.require_checkpoints()
        last = last_saved(self.path)
        return None if last is None or (self.saved_step() or 0) >= last else str(self.checkpoint(last))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def with_history(self, config: J) -> J:
        """``config``, as a recipe gives it, with what this folder knows of the forks of its run."""
        if not (self.path / "config.yaml").exists() or self._is_unused():
            return config
        return with_history(config, self._stored(type(config)))

    def require_identity(self, config: JobConfig) -> None:
        """UserError unless ``config`` is of this folder's identity (a recipe may be edited while ranks start)."""
        self._same_identity(self._stored(type(config)), self.with_history(config))

    def require_free_or_same(self, config: JobConfig) -> None:
        """UserError where ``open`` would refuse ``config``: another identity, or lost checkpoints; nothing is
        written."""
        if (self.path / "config.yaml").exists() and not self._is_unused():
            self.require_identity(config)
        self.require_checkpoints()
        self._require_owner()

    def _require_owner(self) -> None:
        """UserError where there are checkpoints, and no config.yaml that says of which run: they would be taken for
        those of any recipe."""
        if self.saved_step() is not None and not (self.path / "config.yaml").exists():
            raise UserError(
                f"{self.checkpoints} has checkpoints, and there is no config.yaml beside it that says of which run",
                hint=f"bring {self.path / 'config.yaml'} back; or begin anew in another folder: name=NEW_NAME",
            )

    def require_checkpoints(self) -> None:
        """UserError where the run had a checkpoint and now has none: to start again from step 0, over the metrics that
        there are, is not decided here."""
        step = None if self.saved_step() is not None else last_saved(self.path)
        if step is not None:
            raise UserError(
                f"{self.checkpoints} has no complete checkpoint, and this run had one of step {step:,}",
                allowed="the checkpoints of the run, where it saved them",
                hint=f"mount or copy them back, then give the same command; or begin anew at step 0, in another folder "
                f"(nothing of this one is changed): name=NEW_NAME, or first: mv {self.path} {self.path}-old",
            )

    def require_in_place(self) -> None:
        """RetryableError where the folder of this attempt was moved or deleted: what has its name now, if anything has,
        is another one, and nothing of this attempt may be written there."""
        if self._opened is None:
            return
        try:
            in_place = os.path.samestat(os.fstat(self._opened), os.stat(self.path))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise RetryableError(
                f"{self.path} was moved or deleted while the run was training",
                hint="where it was moved, 'smalti train FOLDER' goes on there from its newest checkpoint",
            )

    def close(self) -> None:
        """Let another process open the folder."""
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
        self.require_checkpoints()
        self._require_owner()
        if not stored.exists():
            store.write_json(self.path / "provenance.json", record)
            store.write_text(stored, _text(config))  # last: it makes the folder a run, which has a provenance
            self.log_folder().mkdir(parents=True, exist_ok=True)
        else:
            before = self._stored(type(config)).model_copy(update={"folder": config.folder})
            self.log_folder().mkdir(parents=True, exist_ok=True)
            store.write_json(self.log_folder() / "provenance.json", record)
            if placement_difference(before, config):
                store.write_text(self.log_folder() / "config.yaml", _text(config))
        self.set_status("starting")

    def _fork(self, fork: Fork) -> None:
        """Give the run its new future; its attempts so far keep the config that they ran under."""
        if difference(self._stored(RunConfig), fork.before) or self.saved_step() != fork.at_step:
            raise UserError(
                f"{self.path} went on while it was being forked", hint="give the same command again, once it has ended"
            )
        text = (self.path / "config.yaml").read_text(encoding="utf-8")
        for number in self.attempts():
            own = self.log_folder(number) / "config.yaml"
            if not own.exists():
                store.write_text(own, text)
        store.write_text(self.path / "config.yaml", _text(fork.after))

    def _is_unused(self) -> bool:
        """Nothing came of the attempts so far, if there were any: no step on record, no checkpoint now or before."""
        if self.saved_step() is not None or last_saved(self.path) is not None:
            return False
        return not any(row.get("step") for row in self.metrics())

    def _is_of_another(self, config: JobConfig) -> bool:
        try:
            return bool(difference(self._stored(type(config)), config))
        except DataError:  # not to be read (another version, another kind of training): whoever it was, it did nothing
            return True

    def _hand_over(self) -> None:
        """Make room for another identity: what described the old one goes to the logs of its attempts."""
        attempts = self.attempts()
        for number in attempts:
            for name in ("config.yaml", "provenance.json"):
                own, shared = self.log_folder(number) / name, self.path / name
                if shared.exists() and not own.exists():
                    store.write_text(own, shared.read_text(encoding="utf-8"))
        for name in ("tokenizer", "trackers", "tb", "wandb"):
            if (self.path / name).is_dir() and attempts:
                (self.path / name).rename(self.log_folder(attempts[-1]) / f"{name}-{utc_text()}")
        (self.path / "config.yaml").unlink()

    def _stored(self, model: type[JobConfig]) -> JobConfig:
        try:
            return self.config(model)
        except UserError as error:
            raise DataError(
                f"{self.path}/config.yaml cannot be read, so it is unknown whose folder this is: {error.message}",
                hint="give another folder with name=NEW_NAME",
            ) from error

    def _same_identity(self, before: JobConfig, config: JobConfig) -> None:
        lines = difference(before, config)
        if lines:
            forked = any(map(is_of_history, lines))
            shown = "".join(f"\n  {line}" for line in lines if not is_of_history(line))
            raise UserError(
                f"{self.path} holds another run; what differs (there -> here):{shown}",
                allowed="the same identity (ranks, device, cadences and other placement may change)",
                hint=f"start a new run with name={config.name}-2, or take the change back to resume this one; "
                "--fork gives this run another future, if only data, length or learning rate differ"
                + (f"; it was forked, and 'smalti train {self.path}' resumes it" if forked else ""),
            )

    def take_lock(self) -> None:
        """Keep others from training here until ``close``; UserError where somebody does."""
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise UserError(
                f"{self.path} is in use: process {owner} is training in it",
                allowed="one 'smalti train' for each run folder",
                hint="wait for it, stop it, or start another run with name=NEW_NAME",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)


def _text(config: JobConfig) -> str:
    """As a run folder holds it: without ``folder``, which is where the file is."""
    return dump(config.model_copy(update={"folder": None}))


def resolve(run: str | Path, *, runs: str | Path = "runs") -> Path:
    """The folder of a run that is named by its path, or by its name in ``runs``; a path that is neither stays."""
    path, named = Path(run), Path(runs) / run
    taken = any((path / name).is_file() for name in _MARKS)
    return named if not taken and (named / "config.yaml").is_file() else path


def runs_beside(path: Path) -> str | None:
    """Which runs there are where ``path`` should be, for the hint of an error; or the one that is meant."""
    parent = path.parent if path.parent.is_dir() and path.parent != Path() else Path("runs")
    names = sorted(entry.parent.name for entry in parent.glob("*/config.yaml"))
    close = nearest(path.name, names)
    if close is not None:
        return f"did you mean '{parent / close}'?"
    return f"runs there: {', '.join(str(parent / name) for name in names[:8])}" if names else None
