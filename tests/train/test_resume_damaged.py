"""A resume that finds a damaged shard while it loads: all comes from the checkpoint before, nothing is mixed."""

from pathlib import Path
from typing import Any

import torch
from gloo_ranks import run_ranks
from line_points import Points, squared

from smalti.base.errors import DataError
from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.distributed.checkpoint.shard_file import ShardFile
from smalti.track.run import RunFolder
from smalti.train.job import build, tensors_of
from smalti.train.loop import fit


def _job(rank: int, folder: Path, ranks: int) -> Any:
    tree = {
        "name": "damaged", "folder": str(folder), "track": {"console": False},
        "train": {"duration": "6step", "global_batch_tokens": 12, "optimizer": {"lr": 0.05},
                  "precision": {"compute": "fp32"}, "eval_every": "1run", "parallel": {"ranks": ranks},
                  "checkpoint": {"every": "2step", "keep": 9}},
    }  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return build(from_dict(JobConfig, tree).config, model=model, loss=squared, batches=Points(rank, ranks))


def _train(rank: int, folder: Path, ranks: int) -> None:
    fit(_job(rank, folder, ranks))


def _state(rank: int, folder: Path, ranks: int) -> tuple[Any, int, dict[str, Any]]:
    """Return the error of the resume, or its step and tensors; and the number of shards that this rank has digested."""
    digested = 0
    finish = ShardFile.finish

    def counted(file: ShardFile) -> str:
        nonlocal digested
        digested += 1
        return finish(file)

    setattr(ShardFile, "finish", counted)  # noqa: B010  (this process is a rank of its own)
    try:
        job = _job(rank, folder, ranks)
    except DataError as error:
        return error.message, digested, {}
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in tensors_of(job.state).items()}
    return job.state.step, digested, {name: tensor.tolist() for name, tensor in whole.items()}


def _flip(checkpoint: Path) -> None:
    """Change a bit of the last tensor of the last shard: all others are read before it."""
    file = sorted(checkpoint.glob("shards/*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_a_shard_that_is_damaged_under_the_load_gives_way_to_the_checkpoint_before(tmp_path: Path) -> None:
    run_ranks(2, _train, tmp_path / "run", 2)
    run = RunFolder.read(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000006").rename(tmp_path / "six")
    (tmp_path / "run/checkpoints/step-00000004").rename(tmp_path / "four")
    at_2 = run_ranks(2, _state, run.path, 2)
    assert [result[:2] for result in at_2] == [(2, 1), (2, 1)], "each rank verifies the shard that it has written"
    (tmp_path / "six").rename(run.checkpoint(6))
    (tmp_path / "four").rename(run.checkpoint(4))

    _flip(run.checkpoint(6))
    _flip(run.checkpoint(4))
    results = run_ranks(2, _state, run.path, 2)
    assert [result[:2] for result in results] == [(2, 3)] * 2
    assert [result[2] for result in results] == [result[2] for result in at_2], "to the bit, the optimizer too"
    rejected = [
        (Path(event["path"]).name, event["reason"]) for event in run.events() if event["event"] == "checkpoint_rejected"
    ]
    reason = "shards/00001.safetensors does not match its digest"
    assert rejected[-2:] == [("step-00000006", reason), ("step-00000004", reason)]
    assert sorted(path.name for path in run.checkpoints.glob("*step-*")) == [
        "rejected-step-00000004", "rejected-step-00000006", "step-00000002",
    ]  # fmt: skip


def test_where_all_are_damaged_the_run_stops_and_nothing_is_renamed(tmp_path: Path) -> None:
    run_ranks(1, _train, tmp_path / "run", 1)
    run = RunFolder.read(tmp_path / "run")
    for step in (2, 4, 6):
        _flip(run.checkpoint(step))
    ((message, digested, _),) = run_ranks(1, _state, run.path, 1)
    assert "no checkpoint in" in message
    assert all(f"step-0000000{step}: shards/00000" in message for step in (2, 4, 6))
    assert digested == 3
    assert sorted(path.name for path in run.checkpoints.glob("*step-*")) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]
