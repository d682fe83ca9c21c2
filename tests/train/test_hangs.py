"""Ranks of a real run hang: the watchdog names the guilty one, and the run ends as if nothing had happened."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import toy_run
from forked_command import ForkedCommand, start

from smalti.config.load import dump

pytestmark = pytest.mark.slow
FLOOR_S = 5.0


def _start(root: Path, *overrides: str, steps: int = 160) -> tuple[ForkedCommand, Path]:
    config = toy_run.config(root, "dense", parallel={"ranks": 2, "threads": 1}, duration=f"{steps}step")
    recipe = root / "recipe.yaml"
    recipe.write_text(dump(config))
    every = ("train.checkpoint.every=20step", f"train.restart.hang_floor={FLOOR_S:g}s", "train.log_every=10step")
    return start("train", str(recipe), *every, *overrides), Path(config.run_folder)


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ({"kind": "sigstop"}, "forward"),
        ({"kind": "held_gil"}, "forward"),
        ({"kind": "deadlock"}, None),
        ({"kind": "stuck_data"}, "data"),
    ],
)
def test_the_guilty_rank_is_named_and_the_run_continues(tmp_path: Path, fault: dict[str, Any], phase: str) -> None:
    faults = json.dumps([{**fault, "rank": 1, "step": 120}])
    command, folder = _start(tmp_path, f"chaos.faults={faults}")
    code, output = command.finish()
    assert code == 0, output
    (event,) = _events(folder, "rank_hung")
    assert event["rank"] == 1, event
    assert phase is None or event["phase"] == phase
    assert event["detected_s"] < 60  # a machine may be slow; bench/recovery.py measures
    evidence = json.loads((folder / "logs/attempt-0" / event["evidence"]).read_text())
    assert [slot["rank"] for slot in evidence["slots"]] == [0, 1]
    assert "File " in evidence["ranks"][0]["stack"]
    assert [each["attempt"] for each in _events(folder, "attempt_started")] == [0, 1]


def test_a_rank_that_is_stopped_for_a_short_time_is_no_alarm(tmp_path: Path) -> None:
    command, folder = _start(tmp_path)
    end = time.monotonic() + 60
    while not (folder / "checkpoints" / "latest").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    rank = command.ranks()[1]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(rank, signal.SIGCONT)
    code, output = command.finish()
    assert code == 0, output
    assert not _events(folder, "rank_hung")
    assert len(_events(folder, "attempt_started")) == 1


def test_a_run_continues_without_a_rank_whose_faults_are_injected_again_and_then_with_it(tmp_path: Path) -> None:
    killed = {"kind": "sigkill", "rank": 1, "step": 10}
    pause = {"kind": "sigstop", "rank": 0, "step": 10, "attempt": 2, "duration": "3s"}  # not done before it may grow
    faults = json.dumps([killed, {**killed, "attempt": 1}, pause])
    grows = ("train.restart.min_ranks=1", "train.restart.grow_after=2s")
    command, folder = _start(tmp_path, f"chaos.faults={faults}", *grows)
    code, output = command.finish(300)
    assert code == 0, output
    assert "the next attempt starts by itself on all 2 ranks" in output
    started = [(event["ranks"], event.get("ranks_wanted")) for event in _events(folder, "attempt_started")]
    assert started == [(2, 2), (2, 2), (1, 2), (2, 2)]
    shrunk, grown = _events(folder, "attempt_ended")[2:]
    assert (shrunk["cause"], grown["code"]) == ("grow", 0)
    resumed = {event["attempt"]: event["step"] for event in _events(folder, "resumed")}
    assert resumed.get(3, 0) == shrunk["step"], "no step is lost"


@pytest.mark.exhaustive
def test_a_slow_rank_makes_the_run_save_and_check_its_node(tmp_path: Path) -> None:
    """The fall of MFU is measured by real ranks; in tests/fleet it is written by the test."""
    slow = json.dumps([{"kind": "slow_rank", "rank": 1, "step": 60, "slowdown": 30}])
    check = ("train.health.command=exit 0", "train.health.mfu_below=0.5", "train.log_every=1step")
    command, folder = _start(tmp_path, f"chaos.faults={slow}", *check)
    code, output = command.finish()
    assert code == 0, output
    assert [(event["why"], event["result"]) for event in _events(folder, "node_checked")] == [("slow", "healthy")]
    first, second = _events(folder, "attempt_ended")
    assert (first["cause"], second["code"]) == ("slow", 0)
    assert [event["step"] for event in _events(folder, "resumed")] == [first["step"]], "no step is lost"
