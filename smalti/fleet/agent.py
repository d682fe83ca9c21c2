"""The parent of a node's ranks: starts them, waits, and ends the attempt as soon as one of them is dead.

Guarantees: no rank outlives the agent. A dead rank ends the attempt within ``grace_s`` and a few seconds, and the cause
is named. SIGTERM and the first Ctrl-C are forwarded, so that the ranks save; the second Ctrl-C kills at once.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self

from smalti.base import clock
from smalti.base.errors import ExitCode, RetryableError
from smalti.base.log import get
from smalti.base.machine import cpu_count
from smalti.fleet.launch.local import LOST_PEER, Rank, free_port, start
from smalti.track.events import EventLog
from smalti.track.out_of_memory import describe, happened
from smalti.track.run import RunFolder
from smalti.track.sinks.console import wants_live

_POLL_S = 0.05
_KILL_WAIT_S = 4.0
_PORT_TRIES = 3
_TAIL_LINES = 15
_ANSWERS = (ExitCode.USAGE, ExitCode.CHECK_FAILED)
_UNSAVED = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a rank that was asked to stop before it trained."""
_RESUME = "run the same command again; it continues from the newest checkpoint"
_START_OVER = "run the same command again; it starts from the beginning"
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt: exit code and reason."""

    code: int
    reason: str
    """One line: which rank, how, after which step."""
    details: tuple[str, ...] = ()
    """Last lines of the log of the rank that caused it, unless rank 0 has printed the error."""
    hint: str | None = None
    printed: bool = False
    """Rank 0 has printed the error on the terminal."""
    cause: str | None = None
    """``oom``: a rank ran out of memory."""
    next_microbatch_tokens: int | None = None
    """Microbatch of the next attempt after ``oom``; None: there is no smaller one."""


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
    with _StopRequests() as requests:
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
    requests: "_StopRequests",
    *,
    ranks: int,
    threads: int,
    grace_s: float,
    stop_s: float,
) -> Outcome:
    assert folder.attempt is not None
    events = folder.event_log()
    started_s, step_before = clock.now_s(), _last_step(folder)
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
        watch = _Watch(started, requests, grace_s, stop_s)
        try:
            watch.wait()
        finally:
            watch.kill_all()
        if attempt_at_port + 1 == _PORT_TRIES or not _port_was_taken(watch, _last_step(folder) > step_before):
            break
        get("fleet").info("the port for the ranks was taken by another process; starting them again")
    outcome = _judge(watch, folder)
    _record(outcome, watch, events, folder, clock.now_s() - started_s)
    return outcome


class _StopRequests:
    """Counts of the signals to the agent."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.terminations += 1


class _Watch:
    """Polls the ranks until none is left."""

    def __init__(self, ranks: list[Rank], requests: _StopRequests, grace_s: float, stop_s: float) -> None:
        self.ranks = ranks
        self.requests = requests
        self.deaths: list[Rank] = []
        """Ranks that did not end with 0, in the order in which that was seen."""
        self.stopped_by: signal.Signals | None = None
        self.out_of_time = False
        self.left: list[Rank] = []
        """Ranks that had to be killed; if some of them are stopped (SIGSTOP), these alone."""
        self.any_stopped = False
        self._grace_s, self._stop_s = grace_s, stop_s
        self._kill_at_s: float | None = None

    def wait(self) -> None:
        """Wait until all ranks have ended, or until the others must be killed."""
        while any(rank.code is None for rank in self.ranks):
            self._forward()
            self._collect_deaths()
            if self.requests.interrupts > 1:
                return
            if self._kill_at_s is not None and clock.now_s() >= self._kill_at_s:
                self.out_of_time = self.stopped_by is not None and not self._causes()
                return
            time.sleep(_POLL_S)
        self._collect_deaths()

    def kill_all(self) -> None:
        """Kill the ranks that are left (SIGKILL), and wait for them."""
        running = [rank for rank in self.ranks if rank.code is None]
        stopped = [rank for rank in running if rank.is_stopped]
        self.left = stopped or running
        self.any_stopped = bool(stopped)
        for rank in self.ranks:
            rank.kill()
        end_s = clock.now_s() + _KILL_WAIT_S
        while clock.now_s() < end_s and any(rank.code is None for rank in self.ranks):
            time.sleep(_POLL_S)

    def cause(self) -> Rank | None:
        """Return the rank that caused the end: by signal, exit code, 75, lost peer, in this order; else the first."""
        blamed = self._causes()
        return min(blamed, key=_blame_order) if blamed else None

    def _causes(self) -> list[Rank]:
        expected: set[int] = {ExitCode.RETRY, ExitCode.INTERRUPTED, *_UNSAVED} if self.stopped_by else set()
        if any(rank.code in _UNSAVED for rank in self.deaths):
            expected |= {LOST_PEER} if self.stopped_by else set()  # it lost a rank that was asked to stop
        return [rank for rank in self.deaths if not rank.killed_by_us and rank.code not in expected]

    def _forward(self) -> None:
        """Forward the first request to stop; a Ctrl-C after a SIGTERM is forwarded too."""
        wanted = signal.SIGINT if self.requests.interrupts else signal.SIGTERM if self.requests.terminations else None
        if wanted is None or wanted == self.stopped_by:
            return
        self.stopped_by = wanted
        for rank in self.ranks:
            rank.send(wanted)
        self._kill_by(self._stop_s)

    def _collect_deaths(self) -> None:
        for rank in self.ranks:
            if rank.code not in (None, 0) and rank not in self.deaths:
                self.deaths.append(rank)
                if rank.code in _UNSAVED and self.stopped_by:
                    self._kill_by(self._grace_s)  # it was not training yet, and the others wait for it
                elif rank in self._causes():
                    # All ranks end with 2 or 3 together, and rank 0 may still be recording it.
                    self._kill_by(self._grace_s * (2 if rank.code in _ANSWERS else 1))

    def _kill_by(self, seconds: float) -> None:
        due_s = clock.now_s() + seconds
        self._kill_at_s = due_s if self._kill_at_s is None else min(self._kill_at_s, due_s)


def _blame_order(rank: Rank) -> int:
    assert rank.code is not None
    if rank.code == -signal.SIGABRT:
        return 1  # a library aborts when its peer is gone
    return 0 if rank.code < 0 else {ExitCode.RETRY: 3, LOST_PEER: 4}.get(rank.code, 2)


def _judge(watch: _Watch, folder: RunFolder) -> Outcome:
    cause = watch.cause()
    step = _last_step(folder)
    if watch.requests.interrupts > 1:
        return _killed_at_once(folder, step)
    oom_event = happened(folder.events(), folder.attempt)
    if oom_event is not None and watch.stopped_by is None:
        return _out_of_memory(oom_event, cause, watch, step)
    if cause is not None:
        outcome = _lost(cause, watch, step) if cause.code == LOST_PEER else _blamed(cause, watch, step)
        return _with_value_not_finite(outcome, folder) if outcome.code == ExitCode.CHECK_FAILED else outcome
    if watch.stopped_by is None:
        return Outcome(ExitCode.DONE, f"finished after step {step}", printed=True)
    return _stopped(watch.stopped_by, watch, folder, step)


def _killed_at_once(folder: RunFolder, step: int) -> Outcome:
    saved = folder.saved_step()
    since = "of this run" if saved is None else f"since the checkpoint of step {saved}"
    reason = f"stopped at once by the second Ctrl-C after step {step}; nothing {since} was saved"
    return Outcome(ExitCode.INTERRUPTED, reason, hint=_RESUME if saved is not None else _START_OVER)


def _stopped(by: signal.Signals, watch: _Watch, folder: RunFolder, step: int) -> Outcome:
    """Return the outcome of stopped ranks: 75 or 130 if they all ended by themselves, 143 if one did not."""
    codes = {rank.code for rank in watch.ranks}
    saved = _saved_step(folder)
    what = "nothing of this attempt was saved" if saved is None else f"the last checkpoint is of step {saved}"
    if codes == {0}:
        return Outcome(ExitCode.DONE, f"finished after step {step}, as {by.name} came", printed=True)
    if ExitCode.RETRY in codes and not watch.out_of_time and codes.isdisjoint(_UNSAVED):
        printed = watch.ranks[0].code == ExitCode.RETRY
        return Outcome(ExitCode.RETRY, f"stopped by {by.name} after step {step}; {what}", hint=_RESUME, printed=printed)
    if codes == {ExitCode.INTERRUPTED} and saved is not None:
        return Outcome(ExitCode.INTERRUPTED, f"stopped by {by.name} after step {step}", hint=_RESUME, printed=True)
    why = (
        f"{_unresponsive(watch)} did not end in time"
        if watch.out_of_time
        else "it came while the ranks were not training"
    )
    again = _RESUME if folder.checkpoints.exists() else _START_OVER
    reason = f"terminated by {by.name} after step {step}: {why}; {what}"
    if not (step or folder.checkpoints.exists() or watch.out_of_time or codes & {ExitCode.RETRY, ExitCode.INTERRUPTED}):
        reason = f"stopped by {by.name} before the first step; nothing was saved"
    return Outcome(ExitCode.TERMINATED, reason, hint=again)


def _lost(lost: Rank, watch: _Watch, step: int) -> Outcome:
    """Return the outcome if all ranks that died had lost another one: those that were left did not answer."""
    if not watch.left:
        tail = tuple(lost.last_lines(_TAIL_LINES))
        return Outcome(ExitCode.RETRY, f"the ranks lost the connection to each other after step {step}", tail, _RESUME)
    tail = tuple(watch.left[0].last_lines(_TAIL_LINES))
    return Outcome(ExitCode.RETRY, f"{_unresponsive(watch)} did not answer after step {step}", tail, _RESUME)


def _unresponsive(watch: _Watch) -> str:
    """Return ``rank 1 (pid 17), which was stopped (SIGSTOP or a debugger),``."""
    names = [f"rank {rank.rank} (pid {rank.pid})" for rank in watch.left]
    verb = "was" if len(names) == 1 else "were"
    return ", ".join(names) + (f", which {verb} stopped (SIGSTOP or a debugger)," if watch.any_stopped else "")


def _with_value_not_finite(outcome: Outcome, folder: RunFolder) -> Outcome:
    """Return ``outcome`` with the loss or gradient norm that ended the run, if one did."""
    events = [event for event in folder.events() if event["attempt"] == folder.attempt]
    number = next((event for event in events if event["event"] == "not_finite"), None)
    if number is None:
        return outcome
    return replace(outcome, reason=f"the {number['cause']} was {number['value']} at step {number['step']}")


def _blamed(cause: Rank, watch: _Watch, step: int) -> Outcome:
    assert cause.code is not None
    who = f"rank {cause.rank} (pid {cause.pid})"
    tail = tuple(cause.last_lines(_TAIL_LINES))
    if cause.code < 0:
        hint = _RESUME
        if cause.code == -signal.SIGKILL:
            hint += " (if nobody killed it, the machine may be out of memory: see 'dmesg')"
        name = signal.Signals(-cause.code).name
        beside = f"; {_unresponsive(watch)} did not answer either" if watch.any_stopped else ""
        return Outcome(ExitCode.RETRY, f"{who} was killed by {name} after step {step}{beside}", tail, hint)
    known = cause.code in set(ExitCode)
    code = cause.code if known else int(ExitCode.RETRY)
    all_agree = all(rank.code == cause.code for rank in watch.ranks)
    printed = known and (cause.rank == 0 or all_agree)
    reason = f"{who} exited with code {cause.code} after step {step}"
    return Outcome(code, reason, () if printed else tail, _RESUME if code == ExitCode.RETRY else None, printed)


def _out_of_memory(oom_event: Mapping[str, Any], cause: Rank | None, watch: _Watch, step: int) -> Outcome:
    """Return the outcome if a rank ran out of memory, which is the cause whichever rank died first."""
    smaller = oom_event["next_microbatch_tokens"]
    if smaller is None:  # the rank has printed a hint
        outcome = _blamed(next(rank for rank in watch.ranks if rank.rank == oom_event["rank"]), watch, step)
        return replace(outcome, code=ExitCode.USAGE, reason=describe(oom_event), cause="oom")
    hint = f"the next attempt starts by itself with microbatches of {smaller:,} tokens"
    return Outcome(ExitCode.RETRY, describe(oom_event), hint=hint, cause="oom", next_microbatch_tokens=smaller)


def _record(outcome: Outcome, watch: _Watch, events: EventLog, folder: RunFolder, seconds: float) -> None:
    """Record how the attempt ended; where the disk cannot be written, the outcome is returned all the same."""
    stopped = watch.stopped_by is not None and watch.cause() is None
    states = {ExitCode.DONE: "done", ExitCode.INTERRUPTED: "interrupted"}
    state = states.get(ExitCode(outcome.code), "stopped" if stopped else "failed")
    try:
        _write_end(outcome, watch, events, _last_step(folder), seconds)
        folder.set_status(state, step=_last_step(folder), reason=outcome.reason)
    except RetryableError as error:
        get("fleet").warning("the end of the attempt (%s) is not recorded: %s", outcome.reason, error.message)
    finally:
        events.close()


def _write_end(outcome: Outcome, watch: _Watch, events: EventLog, step: int, seconds: float) -> None:
    cause = watch.cause()
    lost = cause is not None and cause.code == LOST_PEER
    if cause is not None and cause.code is not None and not lost:
        how = {"signal": signal.Signals(-cause.code).name} if cause.code < 0 else {"code": cause.code}
        events.write("rank_died", rank=cause.rank, pid=cause.pid, step=step, **how)
    if watch.any_stopped or lost:
        for rank in watch.left:
            events.write("rank_unresponsive", rank=rank.rank, pid=rank.pid, step=step, stopped=watch.any_stopped)
    codes = [int(ExitCode.RETRY) if rank.code == LOST_PEER else rank.code for rank in watch.ranks]
    why = {} if outcome.cause is None else {"cause": outcome.cause}
    events.write("attempt_ended", code=int(outcome.code), reason=outcome.reason, step=step, seconds=round(seconds, 3),
                 codes=codes, **why)  # fmt: skip


def _saved_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint that this attempt saved."""
    saves = [event for event in folder.events() if event["event"] == "checkpoint_saved"]
    return next((int(event["step"]) for event in reversed(saves) if event["attempt"] == folder.attempt), None)


def _last_step(folder: RunFolder) -> int:
    """Return the last step that was logged; 0 before the first."""
    return max((int(line["step"]) for line in folder.metrics()), default=0)


def _port_was_taken(watch: _Watch, trained: bool) -> bool:
    if watch.cause() is None or watch.stopped_by is not None or trained:
        return False
    return "EADDRINUSE" in "\n".join(line for rank in watch.ranks for line in rank.last_lines(50))


def announce(outcome: Outcome) -> None:
    """Print on stderr how the attempt ended, unless rank 0 has.

    A rank that was killed leaves its progress line unfinished and the cursor hidden; both are restored here.
    """
    if outcome.printed:
        return
    if wants_live(sys.stderr):
        sys.stderr.write(f"\n{_SHOW_CURSOR}")
    lines = [f"error: {outcome.reason}"]
    if outcome.details:
        lines += ["last lines of its log:", *(f"  {line}" for line in outcome.details)]
    lines += [f"hint: {outcome.hint}"] if outcome.hint else []
    sys.stderr.write("\n".join(lines) + "\n")
