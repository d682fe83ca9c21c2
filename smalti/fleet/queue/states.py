"""The states of a run, and which state follows the end of an attempt. Pure functions.

PENDING -> QUEUED -> STARTING -> RUNNING -> COMPLETED | FAILED | STOPPED
              ^         ^           |
              |         +-- RECOVERING (a fault)
              +------------ TERMINATING (stop, preemption, max_duration: it saves first)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from smalti.base.errors import ExitCode
from smalti.config.launch import RetryCause

State = Literal[
    "PENDING", "QUEUED", "STARTING", "RUNNING", "RECOVERING", "TERMINATING", "COMPLETED", "FAILED", "STOPPED"
]
STATES: tuple[State, ...] = get_args(State)
ENDED: tuple[State, ...] = ("COMPLETED", "FAILED", "STOPPED")
ACTIVE: tuple[State, ...] = ("STARTING", "RUNNING", "TERMINATING")
"""States in which a run has an open attempt, and holds its cores and GPUs."""
WAITING: tuple[State, ...] = ("PENDING", "QUEUED", "RECOVERING")
"""States without a process: such a run is stopped by its row alone."""

_FOLLOWING: dict[State, tuple[State, ...]] = {
    "PENDING": ("QUEUED", "FAILED", "STOPPED"),
    "QUEUED": ("STARTING", "STOPPED"),
    "STARTING": ("RUNNING", "TERMINATING", "RECOVERING", *ENDED),
    "RUNNING": ("TERMINATING", "RECOVERING", *ENDED),
    "RECOVERING": ("STARTING", "STOPPED"),
    "TERMINATING": ("TERMINATING", "QUEUED", *ENDED),
    "COMPLETED": (),
    "FAILED": ("PENDING",),
    "STOPPED": ("PENDING",),
}

_FINAL: dict[int, tuple[State, str]] = {
    ExitCode.DONE: ("COMPLETED", "done"),
    ExitCode.BUG: ("FAILED", "error"),
    ExitCode.USAGE: ("FAILED", "usage"),
    ExitCode.CHECK_FAILED: ("FAILED", "check"),
    ExitCode.NO_PROGRESS: ("FAILED", "no_progress"),
    ExitCode.INTERRUPTED: ("STOPPED", "interrupted"),
}
"""Exit codes that end a run, with its state and cause."""

_FIRST_WAIT_S = 1.0
_MOST_WAIT_S = 300.0
_MEMBER_WAIT_S = 2.0
"""All of its run waits for a member, so the wait does not grow."""


@dataclass(frozen=True)
class Next:
    """What follows the end of an attempt."""

    state: State
    cause: str
    wait_s: float = 0.0
    """Seconds before the next attempt, in the state RECOVERING."""


def may_follow(state: State, following: State) -> bool:
    """Return whether a run in ``state`` may come to the state ``following``."""
    return following in _FOLLOWING[state]


def after(
    code: int | None,
    *,
    stopped_for: str | None,
    retries: int,
    retries_by_cause: Mapping[str, int],
    retried: Mapping[str, int],
) -> Next:
    """Return what follows an attempt that ended with exit code ``code``: minus the signal that killed it, or None where
    its end is not known, because the process that watched it was killed.

    ``stopped_for``: why it was asked to stop (user, preempted, max_duration); None: it was not. ``retried``: attempts
    so far that followed each cause.
    """
    if stopped_for is not None and code not in (ExitCode.DONE, ExitCode.USAGE, ExitCode.CHECK_FAILED):
        return Next("QUEUED" if stopped_for == "preempted" else "STOPPED", stopped_for)
    if code in _FINAL:
        return Next(*_FINAL[code])
    cause = _retry_cause(code)
    if cause is None:
        return Next("FAILED", "exit_code")
    limit = min(retries, retries_by_cause.get(cause, retries))
    if sum(retried.values()) >= retries or retried.get(cause, 0) >= limit:
        return Next("FAILED", cause)
    return Next("RECOVERING", cause, min(_MOST_WAIT_S, _FIRST_WAIT_S * 2 ** retried.get(cause, 0)))


def after_of_member(code: int | None, *, stopped_for: str | None, has_lead: bool) -> Next:
    """Return what follows an attempt of a member: it has no limit of retries, and ends with its run.

    has_lead: whether the run that it is a member of has not ended.
    """
    if not has_lead:
        return Next("STOPPED", "lead")
    if stopped_for is not None:
        return Next("QUEUED", stopped_for)
    return Next("RECOVERING", _retry_cause(code) or "exit_code", _MEMBER_WAIT_S)


def _retry_cause(code: int | None) -> RetryCause | None:
    if code is None:
        return "lost"
    if code < 0:
        return "killed"
    return "fault" if code in (ExitCode.RETRY, ExitCode.TERMINATED) else None
