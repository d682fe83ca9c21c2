"""Many simulated agents on one core: no run and no event is lost, and the queue answers meanwhile."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest

from smalti.base import database
from smalti.cli.fleet.app import _values
from smalti.fleet.queue import runs
from smalti.fleet.queue.states import may_follow

SIMULATED = Path(__file__).parents[2] / "simulated_agents.py"


def highest(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {"median": statistics.median(values), "p95": values[int(len(values) * 0.95)], "max": values[-1]}


@pytest.mark.slow
def test_many_agents(proof, record, monkeypatch):
    """``make prove NAME=many_agents``: 2,000 agents and 10,000 faults. The database is in memory: on a disk its writes,
    one after the other, would be what is measured."""
    n_runs, n_faults = proof(short=40, full=2000), proof(short=40, full=10_000)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as home:
        monkeypatch.setenv("SMALTI_HOME", home)
        cores = sorted(os.sched_getaffinity(0))
        command = ["taskset", "--cpu-list", str(cores[0]), sys.executable, SIMULATED, str(n_runs), str(n_faults), "3"]
        answers: dict[str, list[float]] = {"show": [], "ls": []}
        with open(Path(home) / "result.json", "w+") as output, subprocess.Popen(command, stdout=output) as process:
            while process.poll() is None:
                time.sleep(0.2)
                for name, argument in (("show", "1"), ("ls", None)):
                    begin_s = time.monotonic()
                    if (Path(home) / database.FILE_NAME).exists() and _any_run():
                        _values(argument)
                        answers[name].append(time.monotonic() - begin_s)
            assert process.returncode == 0
            output.seek(0)
            result = json.load(output)
        with database.transaction(write=False) as db:
            every = runs.select(db)
            histories = [[event["state"] for event in runs.events(db, run.number)] for run in every]
            attempts = db.execute("SELECT run, nonce, code, ended_s FROM fleet_attempts").fetchall()
            n_events = db.execute("SELECT COUNT(*) FROM fleet_node_records WHERE kind='fault'").fetchone()[0]
    assert [run.state for run in every] == ["COMPLETED"] * n_runs
    for states in histories:
        assert all(may_follow(before, after) for before, after in pairwise(states)), states
    ends = result["ends"]
    assert sum(ends.values()) - ends["done"] == n_faults
    assert ends["done"] == n_runs
    assert len(attempts) == result["claims"] == n_runs + n_faults  # none started twice, none lost
    assert all(attempt["ended_s"] is not None for attempt in attempts)
    assert n_events == result["fault_events"] == n_runs + n_faults
    figures = {"agents": n_runs, "faults": n_faults, "ends": ends, "events": n_events, "wall_s": result["wall_s"]}
    seconds = {"controller_rounds_s": highest(result["rounds_s"])} | {
        f"{name}_s": highest(values) for name, values in answers.items() if values
    }
    print(json.dumps(figures | seconds, indent=2))
    record("many_agents", figures | seconds)


def _any_run() -> bool:
    with database.transaction(write=False) as db:
        return db.execute("SELECT 1 FROM fleet_runs LIMIT 1").fetchone() is not None
