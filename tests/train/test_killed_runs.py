"""kill -9 of ranks, of the agent or of a whole node while a run saves, on its disk and to an S3 server (SeaweedFS)."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import toy_run
from forked_command import ForkedCommand, start
from gloo_ranks import run_ranks
from s3_buckets import Bucket

from smalti.base.objects import Requests
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.names import complete, folder_name, step_of
from smalti.track.run import RunFolder

KEPT = 2


def _config(root: Path, **section: Any) -> RunConfig:
    return toy_run.config(
        root, duration="100000step", checkpoint=section, parallel={"ranks": 2, "threads": 1}, restart={"attempts": 0}
    )


class _Attempt:
    """The command that trains, once it has saved and copied a checkpoint after this step."""

    def __init__(self, recipe: Path, folder: RunFolder, step: int) -> None:
        self.command: ForkedCommand = start("train", str(recipe))
        deadline_s = time.monotonic() + 300
        while not any(event["event"] == "checkpoint_copied" and event["step"] > step for event in folder.events()):
            assert time.monotonic() < deadline_s, self.command.finish()
            time.sleep(0.01)
        self.ranks = self.command.ranks()

    def kill(self, kind: str, chance: random.Random) -> None:
        """Kill what ``kind`` says, and wait until no process of the run is left."""
        agent = [self.command.pid]
        killed = {
            "one rank": [chance.choice(self.ranks)],
            "all ranks": chance.sample(self.ranks, 2),
            "agent": agent,
            "node": [*agent, *self.ranks],
        }
        for pid in killed[kind]:
            os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for the end of the agent and its ranks, and return the exit code."""
        code, _ = self.command.finish()
        deadline_s = time.monotonic() + 20
        while any(map(psutil.pid_exists, self.ranks)):
            assert time.monotonic() < deadline_s, "a rank has outlived its agent"
            time.sleep(0.005)
        return code


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow  # processes
@pytest.mark.parametrize("s3", ["seaweedfs"], indirect=True)
def test_killed_runs_lose_no_checkpoint_on_the_disk_or_in_the_store(
    tmp_path: Path, s3: Bucket, proof: Any, record: Any
) -> None:
    """After each kill the newest checkpoint on the disk and in the store verify, and what was killed leaves nothing
    for long; a node that is lost takes its disk with it. At the end the weights are those of an undisturbed run."""
    kills, chance, counts = proof(short=3, full=100), random.Random(19), Counter[str]()
    config = _config(tmp_path, every="2step", keep=KEPT, save_to=f"s3://{s3.name}/runs", save_to_keep=KEPT)
    recipe, folder = tmp_path / "recipe.yaml", RunFolder(config.run_folder)
    recipe.write_text(dump(config))
    saved = copied = 0
    for number in range(kills):
        kind = ("one rank", "node", "agent", "all ranks")[number % 4]
        attempt = _Attempt(recipe, folder, saved)
        time.sleep(chance.uniform(0, 0.3))
        attempt.kill(kind, chance)
        copies = _copies(s3)
        hidden = _hidden(folder.checkpoints)
        counts.update({kind: 1, "while a checkpoint was saved": any(name.startswith(".step") for name in hidden)})
        counts["while a copy was incomplete"] += len(_steps_of(s3) - {*copies.complete()}) > 0
        newest = checkpoint.newest(folder.checkpoints)
        assert newest is not None
        assert manifest.fault(newest) is None
        assert step_of(newest) > saved
        fetched = copies.newest(tmp_path / "fetched")
        assert fetched is not None
        assert manifest.fault(fetched) is None
        assert copied < step_of(fetched) <= step_of(newest)
        assert len(hidden) <= 4, "those of this kill alone: each attempt removes what the one before has left"
        saved = copied = step_of(fetched)
        if kind == "node":
            shutil.rmtree(folder.checkpoints)
        else:
            saved = step_of(newest)
        shutil.rmtree(tmp_path / "fetched")
    attempt = _Attempt(recipe, folder, saved)
    attempt.command.send_signal(signal.SIGTERM)
    assert attempt.end() == 75
    assert not _hidden(folder.checkpoints)
    assert len(complete(folder.checkpoints)) == len([*folder.checkpoints.glob("step-*")]) <= KEPT + 1
    copies = _copies(s3)
    names = copies.complete()
    assert len(names) <= KEPT + 1
    assert len(_steps_of(s3) - {*names}) <= 1, "the one that was being copied, or deleted, at the stop"
    assert not any(map(copies._leftovers, names))
    newest = str(folder.checkpoints / complete(folder.checkpoints)[0])
    step, weights = step_of(newest), checkpoint.read_model(newest)
    undisturbed = _config(tmp_path / "undisturbed", every=f"{step}step")
    run_ranks(2, toy_run.fit_until, undisturbed, step, timeout_s=600)
    wanted = checkpoint.read_model(str(RunFolder(undisturbed.run_folder).checkpoints / folder_name(step)))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    record("run_kills", {"kills": kills, **counts, "last_step": step})


def _copies(s3: Bucket) -> Copies:
    return Copies(f"s3://{s3.name}/runs/dense", Requests(5000.0))


def _steps_of(s3: Bucket) -> set[str]:
    return {key.split("/")[2] for key in s3.objects()}
