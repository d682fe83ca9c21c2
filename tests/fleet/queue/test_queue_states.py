"""The states of a run: what follows the end of an attempt."""

import signal
from typing import Any

import pytest

from smalti.base.errors import ExitCode
from smalti.fleet.queue.states import ENDED, STATES, Next, after, may_follow


def end(code: int | None, stopped_for: str | None = None, **changes: Any) -> Next:
    given = {"retries": 3, "retries_by_cause": {}, "retried": {}} | changes
    return after(code, stopped_for=stopped_for, **given)


@pytest.mark.parametrize(
    ("code", "state", "cause"),
    [
        (0, "COMPLETED", "done"),
        (1, "FAILED", "error"),
        (2, "FAILED", "usage"),
        (3, "FAILED", "check"),
        (93, "FAILED", "no_progress"),
        (130, "STOPPED", "interrupted"),
        (75, "RECOVERING", "fault"),
        (143, "RECOVERING", "fault"),
        (-signal.SIGKILL, "RECOVERING", "killed"),
        (None, "RECOVERING", "lost"),
        (7, "FAILED", "exit_code"),
    ],
)
def test_every_exit_code(code: int | None, state: str, cause: str) -> None:
    following = end(code)
    assert (following.state, following.cause) == (state, cause)


def test_every_exit_code_of_smalti_is_known() -> None:
    assert not [code for code in ExitCode if end(code).cause == "exit_code"]


@pytest.mark.parametrize(("why", "state"), [("user", "STOPPED"), ("preempted", "QUEUED"), ("max_duration", "STOPPED")])
def test_a_run_that_was_asked_to_stop(why: str, state: str) -> None:
    for code in (75, 143, 130, 1, -9, None):
        assert end(code, why) == Next(state, why)  # type: ignore[arg-type]
    assert end(0, why).state == "COMPLETED", "it was faster"
    assert end(2, why).state == "FAILED", "again would end the same way"


def test_retries_are_limited_together_and_by_cause() -> None:
    assert end(75, retried={"fault": 2}).state == "RECOVERING"
    assert end(75, retried={"fault": 2, "lost": 1}).state == "FAILED"
    assert end(75, retries_by_cause={"fault": 1}, retried={"fault": 1}) == Next("FAILED", "fault")
    assert end(None, retries_by_cause={"fault": 1}, retried={"fault": 1}).state == "RECOVERING"
    assert end(75, retries=0).state == "FAILED"


def test_each_retry_waits_longer_up_to_a_bound() -> None:
    waits = [end(75, retries=99, retried={"fault": count}).wait_s for count in range(12)]
    assert waits[:3] == [1, 2, 4]
    assert max(waits) == waits[-1] == 300


def test_every_state_can_be_left_or_is_an_end() -> None:
    for state in STATES:
        following = [other for other in STATES if may_follow(state, other)]
        assert following or state == "COMPLETED"
        assert state not in ENDED or following in ([], ["PENDING"]), "only a user resumes"
