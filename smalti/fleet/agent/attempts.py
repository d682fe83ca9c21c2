"""Runs the attempts of a command one after the other."""

from collections.abc import Callable, Sequence

from smalti.base import clock
from smalti.base.log import get
from smalti.base.machine import cpu_count
from smalti.fleet.agent.judge import judge, last_step
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.record import record
from smalti.fleet.agent.requests import StopRequests
from smalti.fleet.agent.watch import Watch
from smalti.fleet.launch.local import free_port, start
from smalti.track.run import RunFolder

_PORT_TRIES = 3


def run(
    command: Sequence[str],
    *,
    ranks: int,
    folder: RunFolder,
    threads: int | str = "auto",
    grace_s: float = 2.5,
    stop_s: float = 120.0,
    at_end: Callable[[Outcome], None] | None = None,
    again: Callable[[], RunFolder] | None = None,
) -> Outcome:
    """Run one attempt of ``command`` on ``ranks`` local ranks to its end.

    Only after ``oom`` the next attempt follows, with half the microbatch, in the folder that ``again`` opens for it.
    ``threads``: CPU threads of each rank, "auto" for cores / ranks. ``grace_s``: how long the other ranks have to end
    by themselves once one is dead. ``stop_s``: how long they have to save after SIGTERM or Ctrl-C. ``at_end`` is called
    with the outcome of each attempt while signals are still caught, so that none changes the exit code. Raises
    RetryableError if the run folder cannot be written before a rank is started; later the outcome is returned all the
    same.
    """
    count = max(1, cpu_count() // ranks) if threads == "auto" else int(threads)
    least: int | None = None
    with StopRequests() as requests:
        while True:
            outcome = _attempt(command, folder, requests, ranks=ranks, threads=count, grace_s=grace_s, stop_s=stop_s)
            if at_end is not None:
                at_end(outcome)
            smaller = outcome.next_microbatch_tokens
            halves = smaller is not None and (least is None or smaller < least)
            if again is None or not halves or requests.interrupts or requests.terminations:
                return outcome
            least = smaller
            folder = again()


def _attempt(
    command: Sequence[str],
    folder: RunFolder,
    requests: StopRequests,
    *,
    ranks: int,
    threads: int,
    grace_s: float,
    stop_s: float,
) -> Outcome:
    assert folder.attempt is not None
    events = folder.event_log()
    started_s, step_before = clock.now_s(), last_step(folder)
    events.write("attempt_started", ranks=ranks, threads=threads, resumes=folder.attempt > 0)
    for attempt_at_port in range(_PORT_TRIES):
        started = start(
            command,
            ranks=ranks,
            threads=threads,
            attempt=folder.attempt,
            port=free_port(),
            log_of=folder.rank_log,
        )
        watch = Watch(started, requests, grace_s, stop_s)
        try:
            watch.wait()
        finally:
            watch.kill_all()
        if attempt_at_port + 1 == _PORT_TRIES or not _port_was_taken(watch, last_step(folder) > step_before):
            break
        get("fleet").info("the port for the ranks was taken by another process; starting them again")
    outcome = judge(watch, folder)
    record(outcome, watch, events, folder, clock.now_s() - started_s)
    return outcome


def _port_was_taken(watch: Watch, trained: bool) -> bool:
    if watch.cause() is None or watch.stopped_by is not None or trained:
        return False
    return "EADDRINUSE" in "\n".join(line for rank in watch.ranks for line in rank.last_lines(50))
