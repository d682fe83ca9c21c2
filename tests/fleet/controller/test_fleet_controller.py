"""The controller with real processes of fake commands: ends, retries, preemption, limits, lost processes."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from queued import attempts, controller, fake, history, logged, rounds, state, until_ended

from smalti.base import clock, database
from smalti.base.errors import UserError
from smalti.base.processes import identity
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller import attempt, lease
from smalti.fleet.controller.lease import Lease, Superseded
from smalti.fleet.controller.loop import Controller
from smalti.fleet.queue import changes, runs
from smalti.fleet.queue.schedule import Room

pytestmark = pytest.mark.usefixtures("home")

slow = pytest.mark.slow


def test_a_controller_that_was_replaced_changes_nothing_more(tmp_path: Path) -> None:
    run = fake(tmp_path, "a")
    first = Lease.take("h")
    assert first is not None
    assert Lease.take("h") is None, "it runs"
    second = Lease.take("h", lease_s=0.0)  # as if the first had not renewed it for long
    assert second is not None
    assert second.token == first.token + 1
    with pytest.raises(Superseded):
        Controller(first, Room(cores=4)).round()
    assert state(run).state == "PENDING"


def test_a_lease_of_a_process_that_has_ended_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lease.take("h") is not None
    monkeypatch.setattr(lease, "is_running", lambda pid, process: False)
    assert Lease.take("h") is not None


def test_the_controller_ends_when_no_run_is_left(tmp_path: Path) -> None:
    run = fake(tmp_path, "a")
    held = Lease.take(runs.this_host())
    assert held is not None
    assert not held.release_if_idle()
    assert not lease.is_needed(runs.this_host())
    changes.stop(run.id)
    assert held.release_if_idle()
    fake(tmp_path, "b")
    assert lease.is_needed(runs.this_host())


def test_a_run_is_given_the_seconds_since_it_began_to_wait_for_its_turn(tmp_path: Path, monkeypatch) -> None:
    run = fake(tmp_path, "a")
    now_s = clock.wall_s()
    row = runs.Attempt(run.number, 0, "n", (), None, None, None, None, None, None)

    def queued_s() -> float:
        return float(attempt._variables(run, row)["SMALTI_FLEET_QUEUED_S"])

    assert queued_s() == 0.0, "it waits for other runs, not for its turn"
    for state_before in ("QUEUED", "RECOVERING"):
        with database.transaction() as db:
            runs.write_event(db, run.number, state_before, cause=None, source="controller")
        with monkeypatch.context() as later:
            later.setattr(clock, "wall_s", lambda: now_s + 100.0)
            assert queued_s() == pytest.approx(100.0, abs=5.0)


def test_a_waiting_run_is_stopped_without_a_controller(tmp_path: Path) -> None:
    run = fake(tmp_path, "a")
    assert changes.stop(run.id).state == "STOPPED"
    assert changes.stop(str(run.number)).state == "STOPPED", "again"
    assert changes.resume(run.id).state == "PENDING"
    with pytest.raises(UserError, match="a-1 is PENDING"):
        changes.resume(run.id)


def test_unknown_runs_and_dependencies(tmp_path: Path) -> None:
    run = fake(tmp_path, "train")
    with pytest.raises(UserError, match="there is no run 'trian-1'") as caught:
        changes.stop("trian-1")
    assert caught.value.hint == "did you mean 'train-1'?"
    with pytest.raises(UserError, match="no run 'train-7'"):
        fake(tmp_path, "b", depends_on=["train-7"])
    changes.stop(run.id)
    with pytest.raises(UserError, match="depends_on: train-1 is STOPPED"):
        fake(tmp_path, "b", depends_on=["train-1"])


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    def add() -> runs.Run:
        return changes.add("a", ["true"], LaunchConfig(), Room(cores=1), directory="/", folder=str(tmp_path / "a"))

    first = add()
    with pytest.raises(UserError, match="a-1, which is PENDING, trains in"):
        add()
    changes.stop(first.id)
    second = add()
    with pytest.raises(UserError, match=f"{second.id}, which is PENDING"):
        changes.resume(first.id)


@slow
def test_ends_retries_and_dependencies(tmp_path: Path) -> None:
    done, failed = fake(tmp_path, "done"), fake(tmp_path, "failed", code=2)
    again = fake(tmp_path, "again", faults=True)
    exhausted = fake(tmp_path, "exhausted", code=75, retries=1)
    after_done = fake(tmp_path, "after", depends_on=[done.id, again.id])
    after_failed = fake(tmp_path, "never", depends_on=[failed.id])
    every = (done, failed, again, exhausted, after_done, after_failed)
    until_ended(controller(), *every)
    ends = [(state(run).state, state(run).cause, state(run).code, len(attempts(run))) for run in every]
    assert ends == [
        ("COMPLETED", "done", 0, 1), ("FAILED", "usage", 2, 1), ("COMPLETED", "done", 0, 2),
        ("FAILED", "fault", 75, 2), ("COMPLETED", "done", 0, 1), ("FAILED", "dependency", None, 0),
    ]  # fmt: skip
    assert history(again) == [
        "PENDING",
        "QUEUED",
        "STARTING",
        "RUNNING",
        "RECOVERING",
        "STARTING",
        "RUNNING",
        "COMPLETED",
    ]
    lines = logged(tmp_path)
    assert lines.index(["end", done.id, attempts(done)[0].nonce]) < lines.index(
        ["begin", after_done.id, attempts(after_done)[0].nonce]
    )


@slow
def test_a_run_of_higher_priority_preempts_which_continues_later(tmp_path: Path) -> None:
    control = controller(cores=2)
    low = fake(tmp_path, "low", seconds=3, cores=2, priority="low", preemptible=True)
    rounds(control, lambda: len(logged(tmp_path)) == 1)
    high = fake(tmp_path, "high", priority="high", cores=2)
    until_ended(control, low, high)
    assert [line[:2] for line in logged(tmp_path)] == [
        ["begin", low.id], ["end", low.id], ["begin", high.id], ["end", high.id], ["begin", low.id], ["end", low.id]
    ]  # fmt: skip
    assert history(low)[3:7] == ["RUNNING", "TERMINATING", "QUEUED", "STARTING"]
    assert [attempt.code for attempt in attempts(low)] == [75, 0]


@slow
def test_stop_and_the_longest_duration(tmp_path: Path) -> None:
    control = controller()
    stopped, limited = fake(tmp_path, "stopped", seconds=60), fake(tmp_path, "limited", seconds=60, max_duration="1s")
    # the other may be stopped before it has written a line
    rounds(control, lambda: any(stopped.id in line for line in logged(tmp_path)))
    assert changes.stop(stopped.id).state == "TERMINATING"
    until_ended(control, stopped, limited)
    assert [(state(run).state, state(run).cause) for run in (stopped, limited)] == [
        ("STOPPED", "user"), ("STOPPED", "max_duration"),
    ]  # fmt: skip


@slow
def test_a_clock_that_jumps_neither_ends_nor_prolongs_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = controller()
    run = fake(tmp_path, "limited", seconds=60, max_duration="3s")
    rounds(control, lambda: state(run).state == "RUNNING")
    now_s = clock.wall_s()
    with database.transaction() as db:  # as after a jump of a day, of this process and of the one that started the run
        db.execute("UPDATE fleet_attempts SET started_s=started_s-86400")
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + 86_400)
    for _ in range(3):
        control.round()
    assert state(run).state == "RUNNING"
    monkeypatch.setattr(clock, "wall_s", lambda: now_s - 86_400)
    until_ended(control, run)
    assert state(run).cause == "max_duration"
    assert 3.0 < sum(attempt.duration_s() for attempt in attempts(run)) < 60.0


def test_how_long_an_attempt_has_run() -> None:
    own = runs.Attempt(1, 0, "n", (), os.getpid(), identity(os.getpid()), 1.0, None, None, None, run_s=0.0)
    assert 0.0 < own.duration_s() < 1e6
    assert replace(own, process="another boot/17", run_s=30.0).duration_s() == 30.0, "what was recorded last"
    assert replace(own, ended_s=900.0, run_s=30.0).duration_s() == 30.0
    assert replace(own, ended_s=61.0, run_s=None).duration_s() == 60.0, "a row of an earlier version"


@slow
def test_a_run_without_gpus_sees_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    command = ["/bin/sh", "-c", 'echo "cuda=$CUDA_VISIBLE_DEVICES hip=${HIP_VISIBLE_DEVICES-unset}" > seen']
    run = changes.add("a", command, LaunchConfig(), Room(cores=1), directory=str(tmp_path))
    until_ended(controller(), run)
    assert (tmp_path / "seen").read_text() == "cuda= hip=\n"


@slow
def test_a_killed_process_of_an_attempt_is_replaced_after_its_command_has_ended(tmp_path: Path) -> None:
    control = controller()
    run = fake(tmp_path, "a", seconds=1)
    rounds(control, lambda: len(logged(tmp_path)) == 1 and state(run).state == "RUNNING")
    killed = attempts(run)[0]
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    until_ended(control, run)
    assert [line[0] for line in logged(tmp_path)] == ["begin", "end", "begin", "end"]
    assert [(attempt.code, attempt.reason is None) for attempt in attempts(run)] == [(None, False), (0, True)]
    assert history(run)[3:5] == ["RUNNING", "RECOVERING"]


@slow
def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    missing = changes.add("a", ["/no/such"], LaunchConfig(), Room(cores=1), directory=str(tmp_path))
    nowhere = changes.add("b", ["true"], LaunchConfig(), Room(cores=1), directory=str(tmp_path / "gone"))
    until_ended(controller(), missing, nowhere)
    for run in (missing, nowhere):
        assert (state(run).state, state(run).code) == ("FAILED", 2)
        assert "could not be started" in (attempts(run)[0].reason or "")


@slow
def test_no_shell_reads_the_arguments(tmp_path: Path) -> None:
    hostile = ["$(touch pwned)", "; touch pwned", "`touch pwned`", "a\nb", "--x={}"]
    command = ["/bin/sh", "-c", 'printf "%s\\0" "$@" > arguments', "sh", *hostile]
    run = changes.add("a", command, LaunchConfig(), Room(cores=1), directory=str(tmp_path))
    until_ended(controller(), run)
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == hostile
    assert not (tmp_path / "pwned").exists()


def test_the_identity_of_a_process() -> None:
    own = identity(os.getpid())
    assert own is not None
    assert own == identity(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    time.sleep(0.1)
    assert identity(child) is None, "a zombie has ended"
    os.waitpid(child, 0)
    assert identity(2**22 + 1) is None
