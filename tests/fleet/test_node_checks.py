"""The command of train.health: run after faults that may be the node's and where MFU falls; its answer is followed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_fleet_agent import script
from test_restarts import HEAD, KILLED

from smalti.config.health import HealthConfig
from smalti.config.load import from_dict
from smalti.config.restart import RestartConfig
from smalti.config.train import TrainConfig
from smalti.fleet import agent
from smalti.fleet.agent import pauses
from smalti.fleet.agent.health import may_be_of_node
from smalti.fleet.agent.pauses import Pauses
from smalti.track.run import RunFolder

SAVES = """
def leave(number, frame):
    with open(f"{folder}/events.jsonl", "a") as file:
        file.write(json.dumps({"event": "stopped", "attempt": attempt, "step": 3}) + "\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
"""


def run(
    tmp_path: Path, body: str, health: dict[str, Any] | None = None, ranks: int = 1, **restart: Any
) -> tuple[agent.Outcome, list[agent.Outcome], list[dict[str, Any]]]:
    """The outcome, that of each attempt, and the events."""
    command = [sys.executable, script(tmp_path, body, HEAD), str(tmp_path)]
    outcomes: list[agent.Outcome] = []
    outcome = agent.run(
        command, ranks=ranks, folder=RunFolder.join(tmp_path, 0), threads=1, grace_s=0.3, at_end=outcomes.append,
        again=lambda _: (command, RunFolder.join(tmp_path, len(outcomes))), restart=RestartConfig(**restart),
        health=HealthConfig(**health) if health else None,
    )  # fmt: skip
    return outcome, outcomes, RunFolder.join(tmp_path, 0).events()


def _checks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "node_checked"]


FAILS_ONCE = f"if not attempt: {KILLED}"


def test_a_healthy_node_trains_on(tmp_path):
    outcome, outcomes, events = run(tmp_path, FAILS_ONCE, {"command": "echo looked at $((1 + 1)) disks"})
    assert (outcome.code, len(outcomes)) == (0, 2)
    (check,) = _checks(events)
    assert (check["attempt"], check["result"], check["code"], check["why"]) == (0, "healthy", 0, "killed")
    assert (check["rank"], check["lines"]) == (0, ["looked at 2 disks"])
    assert (tmp_path / "logs/attempt-0" / check["evidence"]).read_text() == "looked at 2 disks\n"


def test_a_node_that_is_not_healthy_ends_the_run_with_75(tmp_path):
    outcome, outcomes, events = run(tmp_path, FAILS_ONCE, {"command": "echo GPU 3: wrong product; exit 3"})
    assert (outcome.code, len(outcomes)) == (75, 1)
    (check,) = _checks(events)
    assert check["result"] == "unhealthy"
    assert f"was killed by SIGKILL after step 0; the check of node {check['node']} failed: '" in outcome.reason
    assert outcome.details == ("GPU 3: wrong product",)
    assert "another node" in outcome.hint
    assert events[-1]["event"] == "attempt_ended"
    assert (events[-1]["code"], events[-1]["reason"]) == (75, outcome.reason)


@pytest.mark.parametrize(("command", "code"), [("exit 1", 1), ("no-such-command", 127)])
def test_a_check_that_fails_decides_nothing(tmp_path, command, code):
    outcome, outcomes, events = run(tmp_path, FAILS_ONCE, {"command": command})
    assert (outcome.code, len(outcomes)) == (0, 2)
    assert [(check["result"], check["code"]) for check in _checks(events)] == [("failed", code)]


def test_a_check_that_does_not_end_is_killed_with_its_children(tmp_path):
    command = f"sleep 60 & echo $! > {tmp_path}/child; sleep 60"
    outcome, _, events = run(tmp_path, FAILS_ONCE, {"command": command, "timeout": "1s"})
    assert outcome.code == 0
    assert [(check["result"], check["code"]) for check in _checks(events)] == [("no answer", None)]
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()


def test_only_faults_that_may_be_of_the_node_are_checked(tmp_path):
    error = "print('Traceback (most recent call last)\\nKeyError: 1', file=sys.stderr, flush=True); sys.exit(1)"
    _, outcomes, events = run(tmp_path, f"if not attempt: {error}", {"command": "exit 3"})
    assert len(outcomes) == 2
    assert not _checks(events)
    assert may_be_of_node(agent.Outcome(1, "", cause="exception", traceback="RuntimeError: CUDA error: unspecified"))
    assert not may_be_of_node(agent.Outcome(75, "", cause="grow"))


def _metrics(tmp_path: Path, *speeds: float) -> None:
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for speed in speeds:
            file.write(json.dumps({"step": 1, "throughput/device/flops_per_sec": speed}) + "\n")


@pytest.mark.parametrize(
    ("speeds", "falls"),
    [
        ([100.0] * 30 + [60.0] * 20, True),
        ([100.0] * 30 + [80.0] * 20, False),  # not below the share
        ([100.0] * 30 + [60.0] * 19, False),  # not for long
        ([100.0] * 30 + [60.0] * 19 + [75.0], False),
        ([100.0] * 19 + [60.0] * 20, False),  # too little before it
    ],
)
def test_mfu_that_stays_below_a_share_of_its_trailing_median_is_slow(tmp_path, monkeypatch, speeds, falls):
    monkeypatch.setattr(pauses, "_EVERY_S", 0.0)
    _metrics(tmp_path, *[1000.0] * 50)  # of an earlier attempt
    health = HealthConfig(command="true", mfu_below=0.7)
    looks = Pauses(tmp_path, health, grow_after_s=None)
    for speed in speeds:
        _metrics(tmp_path, speed)
        last = looks.look()
    assert bool(last) == falls
    if last:
        assert last.words == "MFU was 60.0% of its trailing median for 20 lines of metrics"


def test_a_slow_run_saves_and_the_node_is_checked(tmp_path):
    body = f"""{SAVES}
if not attempt:
    with open(f"{{folder}}/metrics.jsonl", "a") as file:
        for number in range(60):
            speed = 100 if number < 30 else 10
            file.write(json.dumps({{"step": number, "throughput/device/flops_per_sec": speed}}) + "\\n")
    time.sleep(60)
"""
    outcome, outcomes, events = run(tmp_path, body, {"command": "true", "mfu_below": 0.5})
    assert (outcome.code, len(outcomes)) == (0, 2)
    assert (outcomes[0].cause, outcomes[0].restarts) == ("slow", True)
    assert [(check["why"], check["result"]) for check in _checks(events)] == [("slow", "healthy")]
    assert next(event["cause"] for event in events if event["event"] == "attempt_ended") == "slow"


def test_a_run_on_fewer_ranks_grows_again(tmp_path):
    """Rank 1 fails twice, and no more when it is tried again."""
    body = f"""{SAVES}
if attempt < 2 and rank == 1: {KILLED}
if attempt < 3: time.sleep(60)
"""
    outcome, outcomes, events = run(tmp_path, body, ranks=2, min_ranks=1, grow_after="1s")
    assert (outcome.code, len(outcomes)) == (0, 4)
    started = [event["ranks"] for event in events if event["event"] == "attempt_started"]
    assert started == [2, 2, 1, 2]
    assert outcomes[2].cause == "grow"
    assert outcomes[2].hint == "the next attempt starts by itself on all 2 ranks"


def test_options_without_effect_are_errors():
    with pytest.raises(ValueError, match=r"grow_after=2h has no effect without train\.restart\.min_ranks"):
        RestartConfig(grow_after="2h")
    train = {"duration": "9step", "global_batch_tokens": 32, "optimizer": {"lr": 1e-3}, "restart": {"attempts": 0}}
    with pytest.raises(Exception, match=r"train\.health has no effect with train\.restart\.attempts=0"):
        from_dict(TrainConfig, train | {"health": {"command": "true"}}, "toy")
