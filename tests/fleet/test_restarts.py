"""The agent starts the next attempt by itself, as often as the budget allows, and not for errors that would recur."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from test_fleet_agent import script

from smalti.base.clock import seconds_of
from smalti.config.restart import RestartConfig
from smalti.fleet import agent
from smalti.fleet.agent.restarts import Restarts
from smalti.track.goodput import ledger, read_history
from smalti.track.run import RunFolder

HEAD = """
import json, os, signal, sys, time
rank, attempt, folder = int(os.environ["RANK"]), int(os.environ["SMALTI_ATTEMPT"]), sys.argv[1]
def save(step):
    os.makedirs(f"{folder}/checkpoints/step-{step:08d}")
    open(f"{folder}/checkpoints/step-{step:08d}/COMPLETE", "w").close()
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def run(tmp_path: Path, body: str, ranks: int = 2, **restart) -> tuple[agent.Outcome, list[agent.Outcome], RunFolder]:
    """The outcome, that of each attempt, and the run folder."""
    command = [sys.executable, script(tmp_path, body, HEAD), str(tmp_path)]
    outcomes: list[agent.Outcome] = []

    def again(ranks: int) -> tuple[list[str], RunFolder]:
        return command, RunFolder.join(tmp_path, len(outcomes))

    outcome = agent.run(
        command, ranks=ranks, folder=RunFolder.join(tmp_path, 0), threads=1, grace_s=0.3, at_end=outcomes.append,
        again=again, restart=RestartConfig(**restart), fits=lambda ranks: ranks != 2,
    )  # fmt: skip
    return outcome, outcomes, RunFolder.join(tmp_path, 0)


def test_a_killed_rank_is_followed_by_an_attempt_that_ends_the_run(tmp_path):
    outcome, outcomes, folder = run(tmp_path, f"if rank and not attempt: {KILLED}\nif not attempt: time.sleep(60)")
    assert outcome.code == 0
    assert [(each.code, each.cause, each.rank, each.restarts) for each in outcomes] == [
        (75, "killed", 1, True), (0, None, None, False)
    ]  # fmt: skip
    assert outcomes[0].hint == "the next attempt starts by itself, from the beginning"
    assert [event["attempt"] for event in folder.events() if event["event"] == "attempt_started"] == [0, 1]
    died = next(event for event in folder.events() if event["event"] == "rank_died")
    assert (died["rank"], died["phase"]) == (1, None)  # it wrote no slot
    assert 0 <= died["detected_s"] < 2
    assert died["ending_s"] >= 0.3  # rank 0 did not end by itself
    (interruption,) = ledger(read_history(folder.path, time.time())).interruptions
    end_s = seconds_of(died["time"])
    assert interruption.at_s == pytest.approx(end_s - died["ending_s"] - died["detected_s"], abs=0.1)
    assert interruption.restart_s >= 0.3
    ended = [(event["code"], event.get("cause")) for event in folder.events() if event["event"] == "attempt_ended"]
    assert ended == [(75, "killed"), (0, None)]


def test_attempts_without_a_newer_checkpoint_end_the_run(tmp_path):
    outcome, outcomes, folder = run(tmp_path, f"if rank == 0 and attempt == 1: save(5)\nif rank == 0: {KILLED}")
    assert (outcome.code, len(outcomes)) == (93, 5)  # one without, one with, three without
    assert outcome.reason.endswith("3 attempts in a row saved no newer checkpoint")
    assert outcomes[1].hint == "the next attempt starts by itself, from the checkpoint of step 5"
    assert folder.events()[-1]["code"] == 93
    assert folder.status()["state"] == "failed"


def test_a_checkpoint_after_the_one_that_was_resumed_from_is_progress_though_a_newer_one_was_damaged(tmp_path):
    """Step 150 was damaged and is set aside by the attempt that resumes from 100; each attempt saves 10 steps more."""
    body = f"""
step = 100 + 10 * attempt
if rank == 0:
    if not attempt: save(150)
    else:
        if attempt == 1: os.rename(f"{{folder}}/checkpoints/step-00000150", f"{{folder}}/checkpoints/rejected-150")
        with open(f"{{folder}}/events.jsonl", "a") as file:
            file.write(json.dumps({{"event": "resumed", "attempt": attempt, "step": step - 10}}) + "\\n")
        save(step)
if attempt < 5: {KILLED}
"""
    outcome, outcomes, _ = run(tmp_path, body.replace("\\\\n", "\\n"), ranks=1, no_progress=2)
    assert (outcome.code, len(outcomes)) == (0, 6)
    assert "from the checkpoint of step 110" in outcomes[1].hint


@pytest.mark.parametrize(
    ("restart", "attempts"), [({"attempts": 0}, 1), ({"budget": {"killed": 1}}, 2), ({"budget": {"killed": 0}}, 1)]
)
def test_the_budget_ends_the_run_with_75(tmp_path, restart, attempts):
    outcome, outcomes, _ = run(tmp_path, KILLED, ranks=1, **restart)
    assert (outcome.code, len(outcomes)) == (75, attempts)


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_of_the_user_is_not_repeated(tmp_path, code):
    outcome, outcomes, _ = run(tmp_path, f"sys.exit({code})", ranks=1)
    assert (outcome.code, len(outcomes)) == (code, 1)


def test_the_same_traceback_at_the_same_step_is_not_repeated(tmp_path):
    body = """
    print("Traceback (most recent call last)", file=sys.stderr)
    print(f"KeyError: attempt {attempt // 2} at 0x{attempt}", file=sys.stderr, flush=True)
    if rank == 1: sys.exit(1)
    time.sleep(60)
    """
    outcome, outcomes, _ = run(tmp_path, body)
    assert (outcome.code, len(outcomes)) == (1, 2)
    assert outcome.reason.endswith("the same error at the same step twice")
    assert outcome.traceback.endswith("KeyError: attempt 0 at 0x1")


def test_a_stop_that_was_voted_on_is_not_repeated(tmp_path):
    body = """
    with open(f"{folder}/events.jsonl", "a") as file:
        file.write(json.dumps({"event": "stopped", "attempt": 0, "step": 3}) + "\\n")
    sys.exit(75)
    """
    outcome, outcomes, _ = run(tmp_path, body, ranks=1)
    assert (outcome.code, len(outcomes)) == (75, 1)


def test_a_rank_that_keeps_failing_is_left_out(tmp_path):
    body = f"three = os.environ['WORLD_SIZE'] == '3'\nif three and rank == 1: {KILLED}\nif three: time.sleep(60)"
    outcome, outcomes, folder = run(tmp_path, body, ranks=3, min_ranks=1)
    assert (outcome.code, len(outcomes)) == (0, 3)
    assert outcomes[1].hint == "the next attempt starts by itself on 1 of 3 ranks, without rank 1, from the beginning"
    started = [event for event in folder.events() if event["event"] == "attempt_started"]
    assert [(event["ranks"], event.get("ranks_wanted")) for event in started] == [(3, 3), (3, 3), (1, 3)]
    result = ledger(read_history(folder.path, time.time()))
    length_s = next(event["seconds"] for event in folder.events()[::-1] if event["event"] == "attempt_ended")
    assert result.seconds["degraded"] == pytest.approx(2 * length_s, abs=1e-5)  # times of events are ms since 1970


def test_a_rank_that_keeps_failing_moves_to_a_spare_node_before_it_is_left_out(tmp_path):
    spares = [True, False]
    restarts = Restarts(
        RestartConfig(min_ranks=1), RunFolder.join(tmp_path, 0), 4, replace_node=lambda _: spares.pop(0)
    )
    for expected in (None, 3):
        restarts._failed += [3, 3]
        assert restarts._fewer(4) == expected
        assert not restarts._failed
    assert not spares


@pytest.mark.slow
def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    from smalti.fleet.agent import restarts

    monkeypatch.setattr(restarts, "_WAIT_S", {"disk": 0.2})
    body = "print('error: x could not be written: no space', flush=True)\nsys.exit(0 if rank == 0 or attempt else 75)"
    outcome, outcomes, _ = run(tmp_path, body)
    assert outcome.code == 0
    assert (outcomes[0].cause, outcomes[0].wait_s) == ("disk", 0.2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_while_the_next_attempt_is_waited_for(tmp_path, number, code):
    timer = threading.Timer(2.5, os.kill, (os.getpid(), number))
    timer.start()
    outcome, outcomes, _ = run(tmp_path, "if rank: print('the disk is full', flush=True); sys.exit(75)")
    timer.join()
    assert (outcome.code, len(outcomes)) == (code, 1)
    assert outcomes[0].wait_s == 10


def test_options_without_effect_are_errors():
    with pytest.raises(ValueError, match=r"min_ranks has no effect with train\.restart\.attempts=0"):
        RestartConfig(attempts=0, min_ranks=1)
