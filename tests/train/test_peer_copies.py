"""Copies of the state in shared memory: a run whose ranks are killed continues from them, and equals to the bit."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import toy_run
from forked_command import ForkedCommand, start

from smalti.base.errors import RetryableError, UserError
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.fleet.agent import memory
from smalti.track.checkpoints.names import complete, step_of
from smalti.track.run import RunFolder
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return checkpoint.read_model(str(checkpoint.newest(f"{config.run_folder}/checkpoints")))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(config.run_folder).events() if event["event"] == kind]


# ---- in one process: which copy is taken ----------------------------------------------------------------------------


class _Killed(Exception):
    pass


class _KillAfter(Hook):
    """Ends the attempt after a step. Each step waits for the save before it, so that the steps of copies are known."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, job: Job, result: StepResult) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        if job.state.step == self._step:
            raise _Killed


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("SMALTI_PEER_MEMORY", str(folder))
    return folder


def _wait(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def _config(root: Path, every: str = "1run", copies: str = "8step") -> RunConfig:
    return toy_run.config(root, duration="12step", checkpoint={"every": every, "peer_copies": copies})


def _interrupted(config: RunConfig, step: int) -> None:
    with pytest.raises(_Killed):
        fit(build(config, hooks=[_KillAfter(step)]))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbs."""
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        (root / "shared").mkdir()
        patch.setenv("SMALTI_PEER_MEMORY", str(root / "shared"))
        config = _config(root)
        fit(build(config))
    return _weights(config)


def test_the_next_attempt_continues_from_memory_and_equals_to_the_bit(
    tmp_path: Path, shared: Path, wanted: dict[str, torch.Tensor]
) -> None:
    config = _config(tmp_path, copies="4step")
    _interrupted(config, 6)
    assert complete(shared) == ["step-00000004"]
    assert not complete(f"{config.run_folder}/checkpoints"), "nothing was on the disk"
    fit(build(config))
    resumed = _events(config, "resumed")
    assert [(event["step"], event["source"]) for event in resumed] == [(4, "peer memory")]
    assert _same(_weights(config), wanted)
    rows = RunFolder(config.run_folder).metrics()
    assert {row["step"] for row in rows if "ckpt/peer_s" in row} >= {4, 8}
    assert complete(shared) == ["step-00000008"], "one copy; the last step is saved on the disk alone"


def _truncate(shard: Path) -> str:
    shard.write_bytes(shard.read_bytes()[:-1])
    return "bytes"


def _flip(shard: Path) -> str:
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    return "does not match its digest"


def _remove(shard: Path) -> str:
    shard.unlink()
    return "is missing"


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [_flip, _truncate, _remove])
def test_a_damaged_copy_is_reported_and_the_disk_is_used(
    damage: Callable[[Path], str], tmp_path: Path, shared: Path, wanted: dict[str, torch.Tensor]
) -> None:
    config = _config(tmp_path, "5step")
    _interrupted(config, 9)
    (newest,) = complete(shared)
    assert newest == "step-00000008"
    reason = damage(shared / newest / "shards/00000.safetensors")
    fit(build(config))
    assert [(event["step"], event.get("source")) for event in _events(config, "resumed")] == [(5, None)]
    (rejected,) = _events(config, "checkpoint_rejected")
    assert rejected["path"] == str(shared / newest)
    assert reason in rejected["reason"]
    assert _same(_weights(config), wanted)


def test_a_damaged_copy_without_a_checkpoint_starts_from_the_beginning_in_the_next_attempt(
    tmp_path: Path, shared: Path, wanted: dict[str, torch.Tensor]
) -> None:
    config = _config(tmp_path)
    _interrupted(config, 9)
    _flip(shared / "step-00000008/shards/00000.safetensors")
    with pytest.raises(RetryableError, match="the copy in memory was damaged"):
        build(config)
    assert not complete(shared)
    fit(build(config))
    assert not _events(config, "resumed")
    assert _same(_weights(config), wanted)


def test_of_memory_and_disk_the_newer_one_is_taken(tmp_path: Path, shared: Path) -> None:
    config = _config(tmp_path, "5step")
    _interrupted(config, 7)
    assert complete(shared) == ["step-00000005"], "a checkpoint is copied too"
    shutil.rmtree(shared / "step-00000005")
    fit(build(config))
    assert [(event["step"], event.get("source")) for event in _events(config, "resumed")] == [(5, None)]


def test_a_run_that_continued_from_memory_and_lost_it_starts_from_its_disk(tmp_path: Path, shared: Path) -> None:
    config = _config(tmp_path, "5step")
    _interrupted(config, 9)
    with pytest.raises(_Killed):  # an attempt that continues from step 8 and saves nothing
        fit(build(config, hooks=[_KillAfter(9)]))
    shutil.rmtree(shared / "step-00000008")
    fit(build(config))
    assert [event["step"] for event in _events(config, "resumed")] == [8, 5]
    assert not _events(config, "checkpoint_rejected"), "a copy that ended with its agent is no lost checkpoint"


def test_memory_that_is_full_is_a_warning_and_checkpoints_are_saved(tmp_path: Path, shared: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", shared], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        config = _config(tmp_path, "5step")
        with pytest.raises(_Killed):
            fit(build(config, hooks=[_KillAfter(9)]))
        failed = _events(config, "peer_copy_failed")
        assert [event["step"] for event in failed] == [5, 8]
        assert "No space left" in failed[0]["reason"]
        assert not complete(shared)
        assert complete(f"{config.run_folder}/checkpoints") == ["step-00000005"]
    finally:
        subprocess.run(["umount", shared], check=True)


def test_ranks_without_an_agent_refuse_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMALTI_PEER_MEMORY", raising=False)
    with pytest.raises(UserError, match="nothing outlives the ranks"):
        build(_config(tmp_path))


# ---- under the agent ------------------------------------------------------------------------------------------------


def _started(config: RunConfig, root: Path) -> ForkedCommand:
    recipe = root / "recipe.yaml"
    recipe.write_text(dump(config))
    return start("train", str(recipe))


def _folders() -> set[Path]:
    return set(memory.SHARED.glob(f"smalti-{os.getuid()}-*"))


def _copied(config: RunConfig, step: int) -> bool:
    """Whether a copy of this step or a later one is known to be complete."""
    try:
        rows = RunFolder(config.run_folder).metrics()
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return any("ckpt/peer_s" in row and row["step"] >= step for row in rows)


def _of_agent(root: Path, **train: Any) -> RunConfig:
    settings = {"every": "1run", "peer_copies": "3step"}
    return toy_run.config(
        root, "moe", duration="40step", checkpoint=settings, parallel={"ranks": 2, "threads": 1}, **train
    )


@pytest.mark.slow
@pytest.mark.skipif(not memory.SHARED.is_dir(), reason="shared memory of Linux")
def test_a_killed_rank_costs_the_steps_since_the_newest_copy_and_no_disk_is_read(tmp_path: Path) -> None:
    undisturbed, config = _of_agent(tmp_path / "one"), _of_agent(tmp_path / "two")
    code, output = _started(undisturbed, tmp_path / "one").finish()
    assert code == 0, output
    before = _folders()
    agent = _started(config, tmp_path / "two")
    _wait(lambda: _copied(config, 9))
    os.kill(agent.ranks()[1], signal.SIGKILL)
    (folder,) = _folders() - before
    assert folder.stat().st_mode & 0o077 == 0, "weights are for their owner"
    code, output = agent.finish()
    assert code == 0, output
    assert "recovered from peer memory" in output
    (resumed,) = _events(config, "resumed")
    assert resumed["source"] == "peer memory"
    assert resumed["step"] >= 9
    assert not [event for event in _events(config, "checkpoint_saved") if event["step"] < 40], "the disk had none"
    assert _same(_weights(config), _weights(undisturbed))
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not memory.SHARED.is_dir(), reason="shared memory of Linux")
def test_what_a_killed_agent_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    config, before = _of_agent(tmp_path), _folders()
    agent = _started(config, tmp_path)
    _wait(lambda: _copied(config, 3))
    (folder,) = _folders() - before
    ranks = agent.ranks()
    os.kill(agent.pid, signal.SIGKILL)
    _wait(lambda: not any(map(psutil.pid_exists, ranks)))
    assert step_of(complete(folder)[0]) >= 3
    code, output = _started(config, tmp_path).finish()
    assert code == 0, output
    assert not _events(config, "resumed"), "the copies belonged to the agent that is gone"
    assert not folder.exists()
    assert _folders() == before
