"""Waits for runs of the fleet, and prints their output as it comes."""

import sys
import time
from pathlib import Path
from typing import IO

from smalti.base import clock
from smalti.base.errors import CheckFailed, DataError, ExitCode, UserError
from smalti.fleet.controller import start
from smalti.fleet.controller.attempt import output_of
from smalti.fleet.queue import runs
from smalti.fleet.queue.runs import Run
from smalti.track.attempts import attempts as attempts_of
from smalti.track.attempts import log_folder

_POLL_S = 0.3
_ENSURE_S = 2.0


def until_ended(reference: str, timeout_s: float | None = None) -> Run:
    """Return the run once it has ended; a controller runs until then. Raises CheckFailed after ``timeout_s``."""
    begun_s = clock.now_s()
    ensured_s = None
    while True:
        run = runs.read(reference)
        if run.is_ended:
            return run
        if timeout_s is not None and clock.now_s() - begun_s > timeout_s:
            raise CheckFailed(f"{run.id} is {run.state} after {timeout_s:g} s", hint=f"smalti fleet show {run.id}")
        if ensured_s is None or clock.now_s() - ensured_s > _ENSURE_S:
            start.ensure()
            ensured_s = clock.now_s()
        time.sleep(_POLL_S)


def exit_code(run: Run) -> int:
    """Return the exit code of a run that has ended, as ``smalti train`` gives it; 143 if it was never started."""
    if run.state == "COMPLETED":
        return ExitCode.DONE
    if run.code is None or run.cause == "dependency":
        return ExitCode.TERMINATED
    return run.code if 0 < run.code < 256 else ExitCode.RETRY


def log_file(run: Run, *, attempt: int | None, rank: int | None) -> Path:
    """Return the file of an attempt's output, the last by default; with ``rank`` that rank's log in the run folder.

    Raises UserError where there is none.
    """
    if rank is not None:
        return _rank_log(run, attempt, rank)
    files = sorted(run.place.glob("attempt-*.log"), key=lambda file: int(file.stem.partition("-")[2]))
    if attempt is not None:
        files = [output_of(run.place, attempt)] if output_of(run.place, attempt).exists() else []
    if not files:
        which = "" if attempt is None else f" of attempt {attempt}"
        raise UserError(f"{run.id} is {run.state} and has no output{which}", hint=f"smalti fleet events {run.id}")
    return files[-1]


def _rank_log(run: Run, attempt: int | None, rank: int) -> Path:
    if run.folder is None:
        raise DataError(f"{run.id} has no run folder", hint=f"smalti fleet logs {run.id}")
    folder = Path(run.folder)
    numbers = attempts_of(folder)
    number = attempt if attempt is not None else numbers[-1] if numbers else 0
    path = log_folder(folder, number) / f"rank-{rank:03d}.log"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist",
            allowed=", ".join(sorted(file.name for file in log_folder(folder, number).glob("rank-*.log")))
            or "none yet",
            hint=f"smalti fleet logs {run.id}",
        )
    return path


def show(path: Path) -> None:
    """Print a file."""
    with open(path, "rb") as file:
        _copy(file)


def follow(run: Run, *, attempt: int | None, rank: int | None) -> None:
    """Print the output of a run until it has ended: waits for the first attempt, and continues with each next one,
    unless ``attempt`` names one."""
    path: Path | None = None
    file: IO[bytes] | None = None
    ensured_s = clock.now_s()
    while True:
        ended = runs.read(run.id).is_ended
        try:
            newest = log_file(run, attempt=attempt, rank=rank)
        except UserError:  # no attempt yet
            if ended:
                raise
            newest = None
        if file is not None:
            _copy(file)
        if newest is not None and newest != path:
            if file is not None:
                file.close()
            path, file = newest, open(newest, "rb")  # noqa: SIM115 - closed where the next one is opened, and below
            _copy(file)
        if ended:
            break
        if clock.now_s() - ensured_s > _ENSURE_S:
            start.ensure()
            ensured_s = clock.now_s()
        time.sleep(_POLL_S)
    if file is not None:
        file.close()


def _copy(file: IO[bytes]) -> None:
    """Print the rest of an open file; bytes that are no UTF-8 as replacement characters."""
    for line in file:
        sys.stdout.write(line.decode("utf-8", errors="replace"))
    sys.stdout.flush()
