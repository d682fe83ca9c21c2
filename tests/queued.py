"""Runs of fake commands in the queue: a shell script in place of ``smalti train``."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from smalti.base import database
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller.lease import Lease
from smalti.fleet.controller.loop import Controller
from smalti.fleet.queue import changes, runs
from smalti.fleet.queue.runs import Attempt, Run
from smalti.fleet.queue.schedule import Room

SCRIPT = """
end() { [ -z "$begun" ] || echo "end $SMALTI_FLEET_RUN $SMALTI_FLEET_ATTEMPT" >> "$log"; }
log=$1
trap 'trap "" TERM; kill $! 2>/dev/null; end; exit 75' TERM
begun=$(echo "begin $SMALTI_FLEET_RUN $SMALTI_FLEET_ATTEMPT" >> "$log"; echo yes)
sleep "$2" & wait $!
trap "" TERM
end
if [ -n "$4" ] && [ ! -e "$4" ]; then touch "$4"; exit 75; fi
exit "$3"
"""
"""Writes its begin and end to a file; ends with 75 on SIGTERM, and once if a fourth argument is given."""


def fake(
    work: Path,
    name: str,
    *,
    seconds: float = 0.1,
    code: int = 0,
    faults: bool = False,
    cores: int = 1,
    **launch: object,
) -> Run:
    """Queue a run that sleeps and ends with ``code``; with ``faults`` its first attempt ends with 75."""
    marker = str(work / f"{name}.fault") if faults else ""
    command = ["/bin/sh", "-c", SCRIPT, "sh", str(work / "log"), str(seconds), str(code), marker]
    settings = LaunchConfig.model_validate(launch)
    return changes.add(name, command, settings, Room(cores=cores), directory=str(work))


def logged(work: Path) -> list[list[str]]:
    """Return the lines that the commands wrote: begin or end, id, nonce."""
    path = work / "log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def state(run: Run) -> Run:
    """Return the run as it is now."""
    return runs.read(run.id)


def attempts(run: Run) -> list[Attempt]:
    """Return the attempts of a run."""
    with database.transaction(write=False) as db:
        return runs.attempts(db, run.number)


def history(run: Run) -> list[str]:
    """Return the states that a run came to."""
    with database.transaction(write=False) as db:
        return [event["state"] for event in runs.events(db, run.number)]


def controller(cores: int = 4) -> Controller:
    """Return a controller in this process."""
    lease = Lease.take(runs.this_host())
    assert lease is not None, "a controller runs"
    return Controller(lease, Room(cores=cores))


def rounds(control: Controller, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Do rounds of a controller until a condition is true."""
    end_s = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < end_s, subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
        if not control.round():
            time.sleep(0.02)


def until_ended(control: Controller, *wanted: Run, timeout_s: float = 60.0) -> None:
    """Do rounds of a controller until these runs have ended."""
    rounds(control, lambda: all(state(run).is_ended for run in wanted), timeout_s)
    for process in control._started.values():
        process.wait(timeout_s)
