"""Twenty runs through the queue of one machine while its controller is killed again and again at random instants."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from queued import attempts, fake, history, logged, state

from smalti.fleet.queue import changes
from smalti.fleet.queue.runs import Run
from smalti.fleet.queue.states import may_follow

CONTROLLER = Path(__file__).parents[2] / "killed_controller.py"
CORES = 4
ROUND_KILLS = 20

End = tuple[str, str | None]


@dataclass
class Twenty:
    """Twenty runs: what each must end as."""

    work: Path
    ends: dict[str, End] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)

    def add(self, name: str, state: str = "COMPLETED", cause: str | None = "done", **options: Any) -> Run:
        """Queue a run that must end so."""
        run = fake(self.work, name, **options)
        self.ends[run.id], self.runs[run.id] = (state, cause), run
        return run

    @property
    def all_ended(self) -> bool:
        """Whether nothing is left to do."""
        return all(state(run).is_ended for run in self.runs.values())


def queue_of_twenty(work: Path) -> Twenty:
    """Priorities, preemption, dependencies, retries, failures, a limit, one run to cancel, one to stop."""
    queue = Twenty(work)
    queue.add("background", seconds=2, cores=4, priority="low", preemptible=True)
    first = queue.add("first", seconds=0.2, priority="high", faults=True)
    failed = queue.add("usage", "FAILED", "usage", code=2)
    queue.add("bug", "FAILED", "error", code=1)
    queue.add("check", "FAILED", "check", code=3, priority="high")
    queue.add("exhausted", "FAILED", "fault", code=75, retries=1)
    queue.add("limited", "STOPPED", "max_duration", seconds=60, max_duration="0.5s")
    second = queue.add("second", depends_on=[first.id])
    queue.add("third", depends_on=[first.id, second.id], priority="high")
    queue.add("never", "FAILED", "dependency", depends_on=[failed.id])
    queue.add("cancelled", "STOPPED", "user", seconds=60, priority=0)
    queue.add("stopped", "STOPPED", "user", seconds=60, priority=95)
    for number in range(6):
        queue.add(f"usual{number}", seconds=0.1 * number, cores=1 + number % 2, faults=number == 3)
    queue.add("wide", seconds=0.3, cores=4, priority=60)
    queue.add("low", seconds=0.5, priority="low", preemptible=True)
    assert len(queue.runs) == 20
    return queue


def control(kind: str, count: int) -> subprocess.Popen[bytes]:
    """Start a controller that kills itself."""
    return subprocess.Popen([sys.executable, str(CONTROLLER), kind, str(count), str(CORES)])


def kill_and_finish(queue: Twenty, kills: int, rng: random.Random) -> int:
    """Run the queue to its end under controllers of which up to ``kills`` are killed; returns how many were."""
    changes.stop(next(run for run in queue.runs if run.startswith("cancelled")))
    stopped = next(run for run in queue.runs.values() if run.name == "stopped")
    killed, end_s = 0, time.monotonic() + 240
    while not queue.all_ended:
        assert time.monotonic() < end_s, [state(run) for run in queue.runs.values()]
        kind = rng.choice(["lines", "commits"])
        longest = 9.0 if kind == "lines" else 4.0
        count = int(2 ** rng.uniform(0, longest)) * (10 if kind == "lines" else 1) if killed < kills else 2**60
        process = control(kind, count)
        while process.poll() is None:
            if state(stopped).state in ("STARTING", "RUNNING"):
                changes.stop(stopped.id)
            time.sleep(0.02)
        assert process.returncode in (0, -signal.SIGKILL)
        killed += process.returncode != 0
    return killed


def check(queue: Twenty) -> None:
    """None is lost, none was started twice, all have ended as they must, and the room was never exceeded."""
    for run in queue.runs.values():
        now = state(run)
        assert (now.state, now.cause) == queue.ends[run.id], history(run)
        states = history(run)
        assert all(may_follow(before, after) for before, after in pairwise(states)), states  # type: ignore[arg-type]
    lines = logged(queue.work)
    begun = Counter(nonce for what, _, nonce in lines if what == "begin")
    known = {attempt.nonce: attempt for run in queue.runs.values() for attempt in attempts(run)}
    assert set(begun.values()) <= {1}, "an attempt was started twice"
    assert begun.keys() <= known.keys()
    spans = []
    for run in queue.runs.values():
        of_run = [line[0] for line in lines if line[1] == run.id]
        assert of_run == ["begin", "end"] * (len(of_run) // 2), "two attempts of a run overlap"
        spans += [(each.started_s, each.ended_s, run.cores) for each in attempts(run) if each.started_s is not None]
    assert all(ended_s is not None for _, ended_s, _ in spans)
    for at_s, _, _ in spans:
        assert sum(cores for start_s, end_s, cores in spans if start_s <= at_s < end_s) <= CORES


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_twenty_runs_and_a_controller_that_is_killed_at_random_instants(
    tmp_path: Path,
    proof: Callable[..., int],
    record: Callable[[str, dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills, killed, queues = proof(short=5, full=200), 0, 0
    while killed < kills:
        monkeypatch.setenv("SMALTI_HOME", str(tmp_path / f"home-{queues}"))
        work = tmp_path / f"work-{queues}"
        work.mkdir()
        queue = queue_of_twenty(work)
        killed += kill_and_finish(queue, min(ROUND_KILLS, kills - killed), random.Random(queues))
        check(queue)
        queues += 1
    record("controller_kills", {"kills": killed, "queues": queues, "runs": 20 * queues})
