"""Real processes: the command is started, disturbed, and started again."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_run
from forked_command import ForkedCommand, start

from smalti.base.env import child_environment
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.fleet.launch.local import free_port
from smalti.track.progress import Phase

pytestmark = pytest.mark.slow


def _start(recipe: Path, *overrides: str) -> ForkedCommand:
    return start("train", str(recipe), *overrides)


def _run(recipe: Path, *overrides: str) -> tuple[int, str]:
    return _start(recipe, *overrides).finish()


def _recipe(root: Path, kind: str = "moe", **train: Any) -> tuple[Path, Path]:
    config: RunConfig = toy_run.config(root, kind, parallel={"ranks": 2, "threads": 1}, **train)
    path = root / "recipe.yaml"
    path.write_text(dump(config))
    return path, Path(config.run_folder)


def _losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss/train/total"] for line in lines if "loss/train/total" in line}


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def _wait(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def _step_reached(folder: Path, step: int) -> Callable[[], bool]:
    def reached() -> bool:
        try:
            return max(_losses(folder), default=0) >= step
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    return reached


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of an undisturbed run."""
    recipe, folder = _recipe(tmp_path_factory.mktemp("unhurt"), duration="40step")
    code, output = _run(recipe)
    assert code == 0, output
    losses = _losses(folder)
    assert sorted(losses) == list(range(1, 41))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_killed_rank_the_run_continues_by_itself_and_equals_to_the_bit(
    victim: int, tmp_path: Path, unhurt: dict[int, float]
) -> None:
    recipe, folder = _recipe(tmp_path, duration="40step")
    agent = _start(recipe)
    _wait(_step_reached(folder, random.Random(victim).randint(6, 30)))
    process = agent.ranks()[victim]
    os.kill(process, signal.SIGKILL)
    killed_s = time.monotonic()
    _wait(lambda: any(event["event"] == "attempt_ended" for event in _events(folder)))
    assert time.monotonic() - killed_s < 10
    code, output = agent.finish()
    assert code == 0, output
    assert f"rank {victim} " in output
    assert "SIGKILL" in output
    assert "the next attempt starts by itself" in output
    died = [event for event in _events(folder) if event["event"] == "rank_died"]
    assert [event["rank"] for event in died] == [victim]
    assert died[0]["phase"] in [phase.name.lower() for phase in Phase]
    resumed = [event["step"] for event in _events(folder) if event["event"] == "resumed"]
    assert resumed
    assert resumed[0] % 5 == 0
    assert _losses(folder) == unhurt


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "stopped", "killed"), [(2, 1, None), (3, 0, None), (3, 1, 2)])
def test_the_rank_that_is_stopped_is_named_and_not_those_that_wait_for_it(
    ranks: int, stopped: int, killed: int | None, tmp_path: Path
) -> None:
    """The collectives of real ranks time out; the error names the stopped rank, or a killed one before it."""
    recipe, folder = _recipe(tmp_path, "dense", duration="2000step")
    options = ("train.parallel.timeout=10s", "train.restart.attempts=0", "train.restart.hang_floor=1h")
    agent = _start(recipe, f"train.parallel.ranks={ranks}", *options)
    _wait(_step_reached(folder, 3))
    pids = agent.ranks()
    os.kill(pids[stopped], signal.SIGSTOP)
    if killed is not None:
        os.kill(pids[killed], signal.SIGKILL)
    code, output = agent.finish()
    assert code == 75, output
    who = f"rank {stopped} (pid {pids[stopped]}), which was stopped (SIGSTOP or a debugger), did not answer"
    assert who in output
    reason = json.loads((folder / "status.json").read_text())["reason"]
    assert who in reason
    assert reason.startswith(f"rank {stopped if killed is None else killed} (pid ")
    assert "code 76" not in output + (folder / "events.jsonl").read_text()
    assert [event["rank"] for event in _events(folder) if event["event"] == "rank_unresponsive"] == [stopped]
    ended = _events(folder)[-1]
    assert 76 not in ended["codes"]
    assert code == ended["code"]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(("number", "want"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_saves_and_the_resumed_run_is_equal_to_the_bit(
    number: signal.Signals, want: int, tmp_path: Path, unhurt: dict[int, float]
) -> None:
    recipe, folder = _recipe(tmp_path, duration="40step")
    agent = _start(recipe)
    _wait(_step_reached(folder, 7))
    agent.send_signal(number)
    code, output = agent.finish()
    assert code == want, output
    assert output.count("error: ") == output.count("hint: ") == 1, "of rank 0 and the agent only one reports it"
    stopped = next(event for event in _events(folder) if event["event"] == "stopped")["step"]
    assert (folder / "checkpoints" / f"step-{stopped:08d}" / "COMPLETE").exists()
    code, output = _run(recipe)
    assert code == 0, output
    assert _losses(folder) == unhurt


@pytest.mark.exhaustive
def test_a_rank_of_another_launcher_that_waits_in_vain_ends_with_75(tmp_path: Path) -> None:
    """Only Smalti's agent gets another code."""
    recipe, folder = _recipe(tmp_path, "dense", duration="2000step")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "smalti", "train", str(recipe), "train.parallel.timeout=10s"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _wait(_step_reached(folder, 3))
        ranks[1].send_signal(signal.SIGSTOP)
        out, err = ranks[0].communicate(timeout=90)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 75, out + err
    status = json.loads((folder / "status.json").read_text())
    assert status["reason"].startswith("rank 0 lost rank 1 (")
    assert "which does not answer" in status["reason"]


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_is_the_recorded_reason(tmp_path: Path) -> None:
    recipe, folder = _recipe(tmp_path, "dense", duration="20step")
    code, output = _run(recipe, "train.optimizer.lr=1e30", "train.schedule.warmup=0step")
    assert code == 3, output
    event = next(event for event in _events(folder) if event["event"] == "not_finite")
    assert f"error: the {event['cause']} is {event['value']} at step {event['step']}; the model is still" in output
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == f"the {event['cause']} was {event['value']} at step {event['step']}"


@pytest.mark.exhaustive
def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    recipe, folder = _recipe(tmp_path, duration="2000step")
    agent = _start(recipe)
    _wait(_step_reached(folder, 3))
    ranks = agent.ranks()
    for process in ranks:
        os.kill(process, signal.SIGSTOP)  # they cannot save: only the second Ctrl-C can end them
    agent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    agent.send_signal(signal.SIGINT)
    code, output = agent.finish(10)
    assert code == 130, output
    _wait(lambda: not any(Path(f"/proc/{process}").exists() for process in ranks), 5)


@pytest.mark.exhaustive
def test_a_truncated_checkpoint_is_skipped_with_a_warning(tmp_path: Path, unhurt: dict[int, float]) -> None:
    recipe, folder = _recipe(tmp_path, duration="40step")
    agent = _start(recipe)
    _wait(_step_reached(folder, 12))
    agent.send_signal(signal.SIGTERM)
    assert agent.finish()[0] == 75
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    shard = newest / "shards" / "00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    code, output = _run(recipe)
    assert code == 0, output
    assert newest.name in output
    rejected = [event for event in _events(folder) if event["event"] == "checkpoint_rejected"]
    assert newest.name in rejected[0]["path"]
    assert _losses(folder) == unhurt


@pytest.mark.exhaustive
def test_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A real full disk: a small file system that is filled during the run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("may not mount a file system here")
    try:
        recipe, _ = _recipe(tmp_path, duration="400step")
        folder = disk / "run"
        cadence = ("train.checkpoint.every=20step", "train.log_every=10step")
        agent = _start(recipe, f"folder={folder}", *cadence, "train.checkpoint.keep=1")  # no other could make room
        _wait(lambda: (folder / "checkpoints" / "latest").exists())
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"\0" * max(0, free - 150_000))
        _wait(lambda: any(event["event"] == "checkpoint_failed" for event in _events(folder)))
        kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert kept
        agent.send_signal(signal.SIGTERM)
        code, output = agent.finish()
        assert code == 75, output
        assert "could not be saved" in output
        assert sorted(path.name for path in (folder / "checkpoints").glob("*step-*")) == kept
        (disk / "filler").unlink()
        code, output = _run(recipe, f"folder={folder}", "train.duration=400step")
        assert code == 0, output
        assert _events(folder)[-1]["event"] == "attempt_ended"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
