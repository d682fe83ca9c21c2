"""Runs the attempts of a command one after the other, until one ends the run or may not be repeated."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smalti.base import clock
from smalti.base.env import fleet_queued_s
from smalti.base.errors import ExitCode, RetryableError
from smalti.base.log import get
from smalti.base.machine import cpu_count
from smalti.config.health import HealthConfig
from smalti.config.restart import RestartConfig
from smalti.fleet.agent.health import check_nodes
from smalti.fleet.agent.judge import judge, last_step
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.pauses import Pauses
from smalti.fleet.agent.record import record, record_fault
from smalti.fleet.agent.requests import StopRequests
from smalti.fleet.agent.restarts import Restarts
from smalti.fleet.agent.watch import Watch
from smalti.fleet.agent.watchdog import Limits
from smalti.fleet.launch.local import Rank, free_port, start
from smalti.track.progress import slot_file
from smalti.track.run import RunFolder

if TYPE_CHECKING:
    from smalti.fleet.nodes.lead import Nodes

_PORT_TRIES = 3
_OPEN_WAITS_S = (10.0, 20.0, 40.0, 80.0)
_POLL_S = 0.1
_NEVER = RestartConfig(attempts=0)

Again = Callable[[int], tuple[Sequence[str], RunFolder]]
"""Opens the next attempt on so many ranks: returns its command and its folder."""


@dataclass(frozen=True)
class _Patience:
    """How long ranks have to end, once one is dead and after SIGTERM or Ctrl-C; and to make progress."""

    grace_s: float
    stop_s: float
    limits: Limits | None


def run(
    command: Sequence[str],
    *,
    ranks: int,
    folder: RunFolder,
    threads: int | str = "auto",
    grace_s: float = 2.5,
    stop_s: float = 120.0,
    at_end: Callable[[Outcome], None] | None = None,
    again: Again | None = None,
    restart: RestartConfig = _NEVER,
    fits: Callable[[int], bool] = lambda ranks: True,
    limits: Limits | None = None,
    memory: Path | None = None,
    health: HealthConfig | None = None,
    nodes: "Nodes | None" = None,
) -> Outcome:
    """Run attempts of ``command`` on ``ranks`` ranks until the run is done or no attempt may follow.

    After a fault the next one follows as ``restart`` says, after ``oom`` with half the microbatch in any case;
    ``again`` opens it. ``fits``: whether the run can be laid out on fewer ranks. ``threads``: CPU threads of each rank,
    "auto" for cores / ranks. ``limits``: a rank that makes no progress for longer is killed; None: none is.
    ``health``: the check of the nodes before a restart; None: none. ``nodes``: of the ranks; None: this one alone.
    ``memory``: the folder of shared memory for copies of the state, from which the next attempt resumes; None: none.
    ``grace_s``: how long the other ranks have to end once one is dead. ``stop_s``: how long they have to save after
    SIGTERM or Ctrl-C. ``at_end`` is called with the outcome of each attempt while signals are still caught, so that
    none changes the exit code. Raises RetryableError if the run folder cannot be written before a rank is started.
    """
    patience = _Patience(grace_s, stop_s, limits)
    restarts = Restarts(restart, folder, ranks, fits, memory, None if nodes is None else nodes.replace)
    wanted, least, queued_s = ranks, None, fleet_queued_s()
    with StopRequests() as requests:
        while True:

            def decide(outcome: Outcome, attempt: RunFolder = folder, ranks: int = ranks) -> Outcome:
                if again is None or requests.any:
                    return outcome
                return check_nodes(restarts.decide(outcome, attempt, ranks), attempt, health, requests, nodes)

            pauses = Pauses(folder.path, health, grow_after_s=restarts.grow_after_s(ranks), nodes=nodes)
            outcome = _attempt(
                command, folder, requests, decide, ranks=ranks, ranks_wanted=wanted, threads=threads, patience=patience,
                memory=memory, queued_s=queued_s, pauses=None if again is None else pauses, nodes=nodes,
            )  # fmt: skip
            queued_s = 0.0
            if at_end is not None:
                at_end(outcome)
            smaller = outcome.next_microbatch_tokens
            halves = smaller is not None and (least is None or smaller < least)
            _wait(outcome.wait_s, requests)
            if again is None or not (halves or outcome.restarts):
                return outcome
            least, ranks = smaller if halves else least, outcome.next_ranks or ranks
            ranks = ranks if nodes is None else nodes.wait(ranks, restarts.on_fewer_nodes, lambda: requests.any) or 0
            if requests.any:
                return replace(outcome, code=ExitCode.INTERRUPTED if requests.interrupts else ExitCode.RETRY)
            opened = _open(again, ranks, folder, requests) if ranks else None
            if opened is None:
                return outcome
            command, folder = opened


def _open(
    again: Again, ranks: int, folder: RunFolder, requests: StopRequests
) -> tuple[Sequence[str], RunFolder] | None:
    """Return what ``again`` opens, also on a disk that is full for some time; None where that is not possible."""
    for wait_s in (*_OPEN_WAITS_S, None):
        try:
            folder.require_in_place()
            return again(ranks)
        except RetryableError as error:
            get("fleet").error("the next attempt could not be opened: %s", error)
        if wait_s is None or requests.any or not folder.path.exists():
            break
        _wait(wait_s, requests)
    return None


def _wait(seconds: float, requests: StopRequests) -> None:
    """Wait so long, or until a stop is requested."""
    end_s = clock.now_s() + seconds
    while clock.now_s() < end_s and not requests.any:
        time.sleep(_POLL_S)


def _attempt(
    command: Sequence[str],
    folder: RunFolder,
    requests: StopRequests,
    decide: Callable[[Outcome], Outcome],
    *,
    ranks: int,
    ranks_wanted: int,
    threads: int | str,
    patience: _Patience,
    memory: Path | None,
    queued_s: float,
    pauses: Pauses | None,
    nodes: "Nodes | None",
) -> Outcome:
    assert folder.attempt is not None
    local_ranks = ranks if nodes is None else nodes.local_ranks(ranks)
    threads = max(1, cpu_count() // local_ranks) if threads == "auto" else int(threads)
    events = folder.event_log()
    started_s, step_before = clock.now_s(), last_step(folder)
    if patience.limits is not None:
        patience.limits.resumes = folder.saved_step() is not None and memory is None
    queued: dict[str, Any] = {"queued_s": queued_s} if queued_s else {}
    if nodes is not None:
        queued["nodes"] = nodes.place(ranks)
    events.write("attempt_started", ranks=ranks, ranks_wanted=ranks_wanted, threads=threads,
                 resumes=folder.attempt > 0, **queued)  # fmt: skip
    for attempt_at_port in range(_PORT_TRIES):
        started: list[Rank] = (
            [*start(command, ranks=ranks, threads=threads, attempt=folder.attempt, port=free_port(),
                    log_of=folder.rank_log, memory=memory)]
            if nodes is None
            else nodes.start(command, folder, ranks=ranks, threads=threads, memory=memory, stops=lambda: requests.any)
        )  # fmt: skip
        slots = slot_file(folder.log_folder(), 0)
        watch = Watch(started, requests, patience.grace_s, patience.stop_s, slots, patience.limits, pauses, nodes)
        try:
            watch.wait()
        finally:
            watch.kill_all()
        if attempt_at_port + 1 == _PORT_TRIES or not _port_was_taken(watch, last_step(folder) > step_before):
            break
        get("fleet").info("the port for the ranks was taken by another process; starting them again")
    judged = judge(watch, folder)
    record_fault(watch, events, folder)
    outcome = decide(judged)
    record(outcome, watch, events, folder, clock.now_s() - started_s)
    return outcome


def _port_was_taken(watch: Watch, trained: bool) -> bool:
    if watch.cause() is None or watch.stopped_by is not None or trained:
        return False
    return "EADDRINUSE" in "\n".join(line for rank in watch.ranks for line in rank.last_lines(50))
