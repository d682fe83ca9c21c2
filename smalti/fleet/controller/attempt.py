"""The process of an attempt: claims it, runs the command of its run, and records how that ended.

It is the parent of the command, so it alone learns the exit code, also while no controller runs. The claim is one
compare-and-set on the row of the attempt: of several processes with the same nonce exactly one runs the command.
On SIGTERM it asks the command to stop, which saves; after ``_STOP_S`` it kills it. If it is killed itself, the kernel
sends the command SIGTERM, and the controller lets the next attempt wait until that has ended.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from smalti.base import clock, database, store
from smalti.base.disk import writing
from smalti.base.env import child_environment, fleet_attempt, variables_of, visible_gpus
from smalti.base.errors import ExitCode, RetryableError, SmaltiError
from smalti.base.log import get, setup
from smalti.base.processes import age_s, die_with_parent, identity
from smalti.fleet.launch import slurm, ssh
from smalti.fleet.ledger import cordons
from smalti.fleet.queue import runs, secret_values
from smalti.fleet.queue.runs import Attempt, Run

_STOP_S = 180.0
"""Longer than ``smalti train`` lets its ranks save (120 s)."""
_SSH_S = 60.0
"""More for a run on another host, whose supervisor kills it after as long."""
_RECORD_WAIT_S = 5.0
_BEGUN_S = clock.now_s()
_BEAT_S = 30.0
"""Between two records of how long the command has run: after a restart of the machine so much of it may be missing."""


class _Command:
    """The command, which may be asked to stop before and after it has started. ``beat`` is called as it runs."""

    def __init__(self, beat: Callable[[Attempt], None]) -> None:
        self._beat = beat
        self._job: str | None = None
        """Name of its job in Slurm."""
        self._limit_s = _STOP_S
        self.process: subprocess.Popen[bytes] | None = None
        self.stop_asked_s: float | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a request to stop, once."""
        if self.stop_asked_s is None:
            self.stop_asked_s = clock.now_s()
            self._forward()

    def run(self, run: Run, attempt: Attempt, output: IO[bytes]) -> int:
        """Start the command and return its exit code; 143 without a start if it is to stop already."""
        if self.is_stopping():
            return ExitCode.TERMINATED
        command = _arguments(run, attempt)
        environment, request = child_environment(_variables(run, attempt)), None
        if run.engine == "slurm":
            self._job = slurm.job_name(run.id, attempt.number, attempt.nonce)
            with database.transaction(write=False) as db:
                command = slurm.without(command, cordons.active(db))
        elif run.hosts is not None:
            self._limit_s = _STOP_S + _SSH_S
            assert attempt.node is not None
            request = ssh.request_of(
                run.place,
                attempt.number,
                attempt.node,
                run.hosts.options,
                command=command,
                directory=run.directory,
                output=output_of(run.place, attempt.number),
                environment=environment,
            )
            command = [sys.executable, "-m", "smalti.fleet.launch.ssh"]
        self.process = subprocess.Popen(
            command,
            cwd=run.directory if request is None else None,
            env=environment,
            stdin=subprocess.DEVNULL if request is None else subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        if request is not None:
            assert self.process.stdin is not None
            with suppress(BrokenPipeError), self.process.stdin as file:
                file.write(request.encode())
        if self.is_stopping():  # asked while it was being started
            self._forward()
        return self.wait(attempt)

    def is_stopping(self) -> bool:
        """Return whether it was asked to stop."""
        return self.stop_asked_s is not None

    def _forward(self) -> None:
        if self._job is None and self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, attempt: Attempt) -> int:
        """Return the exit code of the command, which is killed if it does not end in time after a request to stop."""
        assert self.process is not None
        beat_s, asked_slurm = clock.now_s(), False
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=1.0)
            if clock.now_s() > beat_s + _BEAT_S:
                beat_s = clock.now_s()
                self._beat(attempt)
            if self._job is not None and self.is_stopping() and not asked_slurm:
                asked_slurm = slurm.stop(self._job)
            if self.stop_asked_s is not None and clock.now_s() > self.stop_asked_s + self._limit_s:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)


def main() -> int:
    """Run the attempt whose nonce is in the environment."""
    setup("INFO")
    command = _Command(_beat)
    signal.signal(signal.SIGTERM, command.stop)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the command
    nonce = fleet_attempt()
    claimed = None if nonce is None else _claim(nonce)
    if claimed is None:
        return ExitCode.DONE
    code, reason = _run(*claimed, command)
    _record(claimed[1], code, reason)
    return ExitCode.DONE


def _claim(nonce: str) -> tuple[Run, Attempt] | None:
    """Make this process the one that runs the attempt; None where another is, or it is not to start any more."""
    pid = os.getpid()
    with database.transaction() as db:
        claimed = db.execute(
            "UPDATE fleet_attempts SET pid=?, process=?, started_s=?, run_s=0 "
            "WHERE nonce=? AND pid IS NULL AND ended_s IS NULL",
            (pid, identity(pid), clock.wall_s(), nonce),
        )
        attempt = runs.attempt_of(db, nonce)
        if claimed.rowcount == 0 or attempt is None:
            return None
        return runs.select(db, "number=?", (attempt.run,))[0], attempt


def _run(run: Run, attempt: Attempt, command: _Command) -> tuple[int, str | None]:
    """Run the command; returns its exit code, and why it could not be started."""
    try:
        with writing(run.place):
            run.place.mkdir(parents=True, exist_ok=True)
            if run.recipe is not None:
                store.write_text(run.place / "recipe.yaml", run.recipe)
            output = open(output_of(run.place, attempt.number), "ab")  # noqa: SIM115 - closed below
        with output:
            code = command.run(run, attempt, output)
        if run.engine == "slurm":
            name = slurm.job_name(run.id, attempt.number, attempt.nonce)
            return (code, None) if command.is_stopping() else slurm.end_of(name, code)
        if run.hosts is not None:
            return ssh.end_of(run.place, attempt.number, code)
        return code, None
    except RetryableError as error:  # a full disk
        return ExitCode.RETRY, error.message
    except (OSError, SmaltiError) as error:
        return ExitCode.USAGE, f"it could not be started: {error}"


def _arguments(run: Run, attempt: Attempt) -> list[str]:
    """Return the command of a run with the names of its attempt. Raises RetryableError where its lead has no host."""
    names = {"{recipe}": str(run.place / "recipe.yaml")}
    if run.hosts is not None:
        names["{host}"] = attempt.node or ""
    if run.member_of is not None:
        with database.transaction(write=False) as db:
            of_lead = runs.attempts(db, run.member_of)
        if not of_lead or of_lead[-1].node is None:
            raise RetryableError("the run that it is a member of was not started")
        names["{lead}"] = of_lead[-1].node
    pattern = re.compile("|".join(map(re.escape, names)))
    return [pattern.sub(lambda found: names[found[0]], argument) for argument in run.command]


def output_of(place: Path, attempt: int) -> Path:
    """Return the file of the output of an attempt, in the folder of its run."""
    return place / f"attempt-{attempt}.log"


def _queued_s(run: int) -> float:
    """Return the seconds since the run began to wait for its turn, at first or again."""
    with database.transaction(write=False) as db:
        times = [event["time"] for event in runs.events(db, run) if event["state"] in ("QUEUED", "RECOVERING")]
    since_s = clock.seconds_of(times[-1]) if times else None
    return 0.0 if since_s is None else max(0.0, clock.wall_s() - since_s)


def _variables(run: Run, attempt: Attempt) -> dict[str, str]:
    """Return what the run gets beside the environment of the controller: its secrets, its time in the queue, and of the
    GPUs only those that it holds."""
    variables = {**secret_values.values(run.group, run.secrets), "SMALTI_FLEET_RUN": run.id}
    variables["SMALTI_FLEET_QUEUED_S"] = f"{_queued_s(run.number):.3f}"
    if run.packed is not None:
        paths = [run.packed, *variables_of(["PYTHONPATH"]).values()]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}  # before a checkout in the directory
    if run.engine == "slurm":  # which has the GPUs
        return variables | {"SLURM_JOB_NAME": slurm.job_name(run.id, attempt.number, attempt.nonce)}
    if run.hosts is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, attempt.gpus))
        return variables
    names = visible_gpus() if attempt.gpus else []
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in attempt.gpus if gpu < len(names))
    return variables if attempt.gpus else variables | {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def _beat(attempt: Attempt) -> None:
    with suppress(SmaltiError), database.transaction() as db:
        db.execute("UPDATE fleet_attempts SET run_s=? WHERE nonce=?", (_ran_s(), attempt.nonce))


def _ran_s() -> float:
    age = age_s(identity(os.getpid()))
    return clock.now_s() - _BEGUN_S if age is None else age


def _record(attempt: Attempt, code: int, reason: str | None) -> None:
    """Record the end, and try again for as long as the disk is full."""
    while True:
        try:
            with database.transaction() as db:
                db.execute(
                    "UPDATE fleet_attempts SET ended_s=?, run_s=?, code=?, reason=? WHERE nonce=? AND ended_s IS NULL",
                    (clock.wall_s(), _ran_s(), code, reason, attempt.nonce),
                )
            return
        except RetryableError as error:
            get("fleet").error("exit code %d is not recorded yet: %s", code, error)
        time.sleep(_RECORD_WAIT_S)


if __name__ == "__main__":
    sys.exit(main())
