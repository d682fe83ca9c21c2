"""When checkpoints are saved, and what the run reports of them."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import toy_run

from smalti.base.errors import UserError
from smalti.config.durations import RunLength
from smalti.cost import checkpoint as cost
from smalti.distributed.checkpoint import saver
from smalti.track.checkpoints.names import complete
from smalti.track.run import RunFolder
from smalti.train import Hook, build, fit
from smalti.train.cadence import Cadence
from smalti.train.loop import Job


class Steps(Hook):
    """Keeps the step at which each checkpoint was reported."""

    def __init__(self, may_write: threading.Event, at: int) -> None:
        self.reported: dict[str, int] = {}
        self._may_write, self._at = may_write, at

    def on_step(self, job: Job, result: Any) -> None:
        if job.state.step == self._at:
            self._may_write.set()

    def on_checkpoint(self, job: Job, path: str) -> None:
        self.reported[Path(path).name] = job.state.step


def test_steps_continue_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), saver._write_shard
    monkeypatch.setattr(saver, "_write_shard", lambda *given: (may_write.wait(30), write(*given))[1])
    hook = Steps(may_write, at=9)  # a disk that is slow until step 9
    fit(build(toy_run.config(tmp_path, duration="12step", checkpoint={"every": "5step", "keep": 3}), hooks=[hook]))
    assert list(hook.reported) == ["step-00000005", "step-00000010", "step-00000012"]
    assert 9 <= hook.reported["step-00000005"] <= 10
    folder = tmp_path / "runs" / "dense"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    saved = [event for event in events if event["event"] == "checkpoint_saved"]
    assert [event["step"] for event in saved] == [5, 10, 12]
    assert saved[0]["blocked_s"] < saved[0]["seconds"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    staged = [row["ckpt/staging_bytes"] for row in metrics if "ckpt/staging_bytes" in row]
    assert len(set(staged)) == 1
    assert staged[0] == pytest.approx(cost.staging_bytes(RunFolder.read(folder).config()), rel=0.02), "as planned"
    assert complete(folder / "checkpoints") == ["step-00000012", "step-00000010", "step-00000005"]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, running, most = saver._write_shard, [], []

    def slowly(*given: Any) -> Any:
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.1)
        running.pop()
        return write(*given)

    monkeypatch.setattr(saver, "_write_shard", slowly)
    fit(build(toy_run.config(tmp_path, duration="4step", checkpoint={"every": "1step", "keep": 9})))
    assert most == [1] * 4
    assert len(complete(tmp_path / "runs/dense/checkpoints")) == 4


def test_a_save_that_fails_is_reported_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = saver._write_shard, []

    def fails_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(*given)

    monkeypatch.setattr(saver, "_write_shard", fails_once)
    fit(build(toy_run.config(tmp_path, duration="4step", checkpoint={"every": "2step"})))
    folder = tmp_path / "runs" / "dense"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = [(event["event"], event["step"]) for event in events if event["event"].startswith("checkpoint_")]
    assert kinds == [("checkpoint_failed", 2), ("checkpoint_saved", 4)]
    assert "No space left" in next(event for event in events if event["event"] == "checkpoint_failed")["reason"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-00000004"]


def test_the_automatic_interval_is_measured_and_reported(tmp_path: Path) -> None:
    fit(build(toy_run.config(tmp_path, duration="3step", checkpoint={"every": "auto"})))
    folder = tmp_path / "runs" / "dense"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    interval = next(event for event in events if event["event"] == "checkpoint_interval")
    blocked_s = next(event for event in events if event["event"] == "checkpoint_saved")["blocked_s"]
    young_s = (2 * max(blocked_s, 1e-3) * 86_400_000) ** 0.5  # a failure for each 1,000 days of one rank
    assert interval["seconds"] == pytest.approx(young_s, rel=0.3)


def test_an_automatic_cadence_asks_for_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, seconds = [100.0], [60.0]
    monkeypatch.setattr("smalti.base.clock.now_s", lambda: now_s[0])
    cadence = Cadence("auto", RunLength(100, ((0, 64),)), lambda: seconds[0])
    now_s[0] = 159.0
    assert not cadence.due(1)
    seconds[0] = 50.0
    assert cadence.due(2)
    cadence.done()
    assert not cadence.due(3)


def test_a_wrong_interval_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.checkpoint\.every"):
        toy_run.config(tmp_path, checkpoint={"every": "automatic"})
