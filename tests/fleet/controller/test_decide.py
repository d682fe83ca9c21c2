"""What the controller does next, from the rows and from what it sees of the processes."""

from dataclasses import replace
from typing import Any

from smalti.fleet.controller.decide import Job, Move, Sight, decide
from smalti.fleet.queue.runs import Attempt, Run
from smalti.fleet.queue.schedule import Room
from smalti.fleet.queue.states import State

RUN = Run(
    number=1, name="r", cluster="local", host="h", state="QUEUED", cause=None, code=None, priority=50,
    preemptible=False, max_duration_s=None, retries=3, retries_by_cause={}, cores=1, gpus=0, command=("true",),
    recipe=None, directory="/", folder=None, code_commit=None, retried={}, not_before_s=0.0, time="",
)  # fmt: skip
OPEN = Attempt(1, 0, "n", (), 9, "p", 100.0, None, None, None)


def move(
    state: State, sight: Sight | None = None, attempt: Attempt | None = OPEN, needs: tuple[State, ...] = (), **run: Any
) -> Move | None:
    """Return the only move for one run on four cores, at second 200."""
    job = Job(replace(RUN, state=state, **run), () if attempt is None else (attempt,), needs, sight)
    moves = decide([job], Room(cores=4), 200.0)
    assert len(moves) <= 1
    return moves[0] if moves else None


def test_a_run_waits_for_those_it_depends_on() -> None:
    assert move("PENDING", needs=("COMPLETED", "RUNNING"), attempt=None) is None
    assert move("PENDING", needs=("COMPLETED",), attempt=None).state == "QUEUED"  # type: ignore[union-attr]
    failed = move("PENDING", needs=("RUNNING", "STOPPED"), attempt=None)
    assert failed is not None
    assert (failed.state, failed.cause) == ("FAILED", "dependency")


def test_a_queued_run_gets_the_next_attempt() -> None:
    started = move("QUEUED", attempt=replace(OPEN, ended_s=150.0, code=75))
    assert started is not None
    assert (started.state, started.attempt, started.gpus) == ("STARTING", 1, ())
    assert move("RECOVERING", not_before_s=201.0, attempt=None) is None


def test_an_intent_that_no_process_has_claimed_stays_until_it_is_stopped() -> None:
    unclaimed = replace(OPEN, pid=None, process=None, started_s=None)
    assert move("STARTING", "unclaimed", unclaimed) is None
    stopped = move("TERMINATING", "unclaimed", unclaimed, cause="user")
    assert stopped is not None
    assert (stopped.state, stopped.code, stopped.ends) == ("STOPPED", 143, unclaimed)
    failed = move("STARTING", "not_starting", unclaimed)
    assert failed is not None
    assert (failed.state, failed.code) == ("FAILED", 1)


def test_a_claimed_attempt_runs() -> None:
    assert move("STARTING", "running").state == "RUNNING"  # type: ignore[union-attr]
    assert move("RUNNING", "running") is None


def test_a_recorded_end_is_believed_whatever_is_seen() -> None:
    done = move("RUNNING", "gone", replace(OPEN, ended_s=150.0, code=0))
    assert done is not None
    assert (done.state, done.ends) == ("COMPLETED", None)


def test_a_lost_process_is_a_fault_and_is_waited_for_while_its_command_runs() -> None:
    lost = move("RUNNING", "gone")
    assert lost is not None
    assert (lost.state, lost.cause, lost.ends, lost.retried) == ("RECOVERING", "lost", OPEN, {"lost": 1})
    assert move("RUNNING", None) is None


def test_the_longest_duration_counts_all_attempts() -> None:
    run = replace(RUN, state="RUNNING", max_duration_s=150.0)
    assert not decide([Job(run, (OPEN,), (), "running", ran_s=100.0)], Room(cores=4), 9e9)
    stopped = decide([Job(run, (OPEN, replace(OPEN, number=1)), (), "running", ran_s=160.0)], Room(cores=4), 200.0)
    assert [(each.state, each.cause, each.attempt) for each in stopped] == [("TERMINATING", "max_duration", 1)]


def test_each_run_gets_gpus_of_its_own() -> None:
    queued = [Job(replace(RUN, number=n, cores=0, gpus=2), ()) for n in (2, 3, 4)]
    active = Job(replace(RUN, state="RUNNING", cores=0, gpus=2), (replace(OPEN, gpus=(1, 2)),), (), "running")
    moves = decide([active, *queued], Room(gpus=6), 200.0)
    assert [(each.run.number, each.gpus) for each in moves] == [(2, (0, 3)), (3, (4, 5))]


def test_a_run_of_another_engine_waits_for_no_room_here() -> None:
    queued = replace(RUN, number=2, engine="slurm", cores=400)
    busy = replace(RUN, state="RUNNING", cores=4)
    moves = decide([Job(busy, (OPEN,), (), "running"), Job(queued, ())], Room(cores=4), 200.0)
    assert [(each.run.number, each.state, each.gpus) for each in moves] == [(2, "STARTING", ())]
    later = replace(queued, state="RECOVERING", not_before_s=300.0)
    assert not decide([Job(later, (replace(OPEN, ended_s=9.0, code=75),))], Room(cores=4), 200.0)
