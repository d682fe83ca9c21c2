"""A controller with simulated agents, without torch: ``python simulated_agents.py AGENTS FAULTS SEED``.

An agent is an attempt of a run: it claims the attempt, appends events to its run folder and records an exit code, by
the functions that real agents use. ``FAULTS`` of the attempts end with a fault, evenly over the runs; each run ends
when it had its share. An agent whose fault is ``lost`` has the id of no process, and records nothing. Prints JSON.
"""

import heapq
import json
import random
import sys
import threading
import time
from collections import deque

from smalti.base import database
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller import attempt as attempts
from smalti.fleet.controller import loop
from smalti.fleet.controller.lease import Lease
from smalti.fleet.queue import changes, runs
from smalti.fleet.queue.schedule import Room
from smalti.track.events import EventLog

NODES = 500
EVENTS = ("checkpoint_saved", "checkpoint_saved", "rank_died")
CODES = {"fault": 75, "killed": -9}
LIFE_S = (0.5, 4.0)
NO_PROCESS = 2**22 + 1


class Started:
    """In place of the process of an agent."""

    def poll(self) -> int:
        return 0


class Agents(threading.Thread):
    """All agents, in one thread."""

    def __init__(self, faults: dict[int, int], draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.asked: deque[str] = deque()
        """Nonces of attempts to claim."""
        self.claims, self.events = 0, 0
        self.codes: dict[str, int] = {}
        self.error: BaseException | None = None
        self._faults, self._draw = faults, draw
        self._due: list[tuple[float, int, runs.Run, runs.Attempt]] = []

    def start_attempt(self, nonce: str) -> Started:
        self.asked.append(nonce)
        return Started()

    def run(self) -> None:
        try:
            while True:
                while self.asked:
                    self._claim(self.asked.popleft())
                while self._due and self._due[0][0] < time.monotonic():
                    _, _, run, attempt = heapq.heappop(self._due)
                    self._end(run, attempt)
                time.sleep(0.002)
        except BaseException as error:
            self.error = error

    def _claim(self, nonce: str) -> None:
        claimed = attempts._claim(nonce)
        if claimed is None:
            return
        self.claims += 1
        run, attempt = claimed
        assert run.folder is not None
        log = EventLog(run.folder, attempt.number)
        for kind in EVENTS:
            log.write(kind, node=f"node-{run.number % NODES}", rank=attempt.number)
            self.events += kind == "rank_died"
        log.close()
        heapq.heappush(self._due, (time.monotonic() + self._draw.uniform(*LIFE_S), self.claims, run, attempt))

    def _end(self, run: runs.Run, attempt: runs.Attempt) -> None:
        cause = "done"
        if self._faults[run.number]:
            self._faults[run.number] -= 1
            cause = self._draw.choice(["fault", "killed", "lost"])
        self.codes[cause] = self.codes.get(cause, 0) + 1
        if cause == "lost":
            with database.transaction() as db:
                db.execute("UPDATE fleet_attempts SET pid=?, process='gone' WHERE nonce=?", (NO_PROCESS, attempt.nonce))
        else:
            attempts._record(attempt, CODES.get(cause, 0), None)


def queue(n_runs: int) -> list[runs.Run]:
    """Append the runs, each of one core."""
    launch = LaunchConfig.model_validate({"retries": 100})
    folder = runs.place().parent / "runs"
    queued = []
    for number in range(n_runs):
        place = folder / str(number)
        place.mkdir(parents=True)
        queued.append(changes.add(f"run{number}", ["true"], launch, Room(1), directory="/", folder=str(place)))
    return queued


def main() -> None:
    """Control the runs until all have ended, and print what happened."""
    n_runs, n_faults, seed = map(int, sys.argv[1:])
    lease = Lease.take(runs.this_host())  # first: a command that finds runs without a controller starts one
    assert lease is not None
    queued = queue(n_runs)
    share, rest = divmod(n_faults, n_runs)
    agents = Agents({run.number: share + (place < rest) for place, run in enumerate(queued)}, random.Random(seed))
    loop.start_attempt = agents.start_attempt  # type: ignore[assignment]
    controller = loop.Controller(lease, Room(n_runs))
    agents.start()
    rounds_s: list[float] = []
    begin_s = time.monotonic()
    while not lease.release_if_idle():
        start_s = time.monotonic()
        moved = controller.round()
        rounds_s.append(time.monotonic() - start_s)
        if agents.error is not None:
            raise agents.error
        if not moved:
            time.sleep(0.05)
    result = {"claims": agents.claims, "ends": agents.codes, "fault_events": agents.events,
              "wall_s": time.monotonic() - begin_s, "rounds_s": sorted(rounds_s)}  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
