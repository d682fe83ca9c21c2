"""A run deletes, blesses and cleans up by its config, writes events of it, and resumes with another ``keep``."""

import shutil
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import run_ranks
from line_points import Points, squared
from synthetic_checkpoint import steps_in

from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.track.run import RunFolder
from smalti.train.job import build
from smalti.train.loop import fit


def _train(rank: int, folder: Path, keep: Any) -> None:
    tree = {
        "name": "kept", "folder": str(folder), "track": {"console": False},
        "train": {"duration": "12step", "global_batch_tokens": 12, "optimizer": {"lr": 0.05},
                  "precision": {"compute": "fp32"}, "eval_every": "1run",
                  "checkpoint": {"every": "2step", "keep": keep}},
    }  # fmt: skip
    fit(build(from_dict(JobConfig, tree).config, model=torch.nn.Linear(1, 1), loss=squared, batches=Points(0, 1)))


def test_a_run_keeps_what_its_config_names(tmp_path: Path) -> None:
    leftovers = [tmp_path / "run/checkpoints" / name for name in (".step-00000099.tmp", "step-00000098/shards")]
    for path in leftovers:
        path.mkdir(parents=True)
    run_ranks(1, _train, tmp_path / "run", {"last": 1, "every": "5step", "blessed": 1, "blessed_after": "4step"})
    run = RunFolder.read(tmp_path / "run")
    assert steps_in(run.checkpoints) == [6, 10, 12]  # the first of every 5 steps and the newest; 6 is blessed too
    assert not any(path.exists() for path in leftovers)
    steps = {kind: [event["step"] for event in run.events() if event["event"] == kind] for kind in
             ("checkpoint_saved", "checkpoint_blessed", "checkpoint_deleted")}  # fmt: skip
    assert steps == {
        "checkpoint_saved": [2, 4, 6, 8, 10, 12], "checkpoint_blessed": [2, 6], "checkpoint_deleted": [4, 8, 2]
    }  # fmt: skip

    shutil.rmtree(run.checkpoint(12))
    run_ranks(1, _train, tmp_path / "run", 1)
    assert steps_in(run.checkpoints) == [12], "a number keeps the newest alone"
    assert [event["event"] for event in run.events()].count("checkpoint_rejected") == 1
