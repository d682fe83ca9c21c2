"""Saves while training continues: what is saved is the state at the start, whatever changes while it is written."""

import json
import os
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from line_points import Points, squared
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from smalti.base import clock
from smalti.base.errors import RetryableError
from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint import saver as saving
from smalti.distributed.checkpoint.saver import Saver
from smalti.distributed.checkpoint.shard_file import Place, ShardFile
from smalti.track.checkpoints import manifest
from smalti.train.job import build
from smalti.train.loop import fit

OF_EVERY_KIND = {
    "model.a": torch.arange(35.0).view(5, 7),
    "model.b": torch.arange(6).to(torch.bfloat16),
    "model.columns": torch.arange(12.0).view(3, 4).t(),
    "model.none": torch.empty(0, 3),
    "model.bits": torch.tensor([True, False, True]),
    "optimizer.step": torch.tensor(3, dtype=torch.int64),
    "quantized": torch.arange(7, dtype=torch.uint8),
}


def _clone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = saving._write_shard
    monkeypatch.setattr(saving, "_write_shard", lambda *given: (may_write.wait(20), write(*given))[1])
    tensors = _clone(OF_EVERY_KIND)
    saver, began_s = Saver(tmp_path), clock.now_s()
    saver.start(4, tensors, {"step": 4}, keep=2)
    saver.wait_copied()
    for tensor in tensors.values():
        tensor.zero_()
    assert saver.is_writing
    assert not list(tmp_path.glob("step-*"))
    may_write.set()
    save, elapsed_s = saver.result(), clock.now_s() - began_s
    assert save is not None
    assert (save.failure, saver.is_writing, manifest.fault(save.path)) == (None, False, None)
    checkpoint.load(save.path, tensors)
    assert all(torch.equal(tensor, OF_EVERY_KIND[name]) for name, tensor in tensors.items())
    assert 0 < save.blocked_s <= elapsed_s


def _beats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return when each beat came, in seconds since the start of a save."""
    monkeypatch.setattr(saving, "_BEAT_S", 0.02)
    saver, beats, began_s = Saver(folder), [], clock.now_s()
    saver.start(1, _clone(OF_EVERY_KIND), {"step": 1}, keep=1)
    save = saver.result(lambda: beats.append(clock.now_s() - began_s))
    assert save is not None
    assert save.failure is None
    return beats


def test_a_writer_that_is_stuck_in_its_disk_does_not_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saving._write_shard
    monkeypatch.setattr(saving, "_write_shard", lambda *given: (time.sleep(0.4), write(*given))[1])
    assert not [beat_s for beat_s in _beats(tmp_path, monkeypatch) if 0.1 < beat_s < 0.4]


def test_a_writer_on_a_slow_disk_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    monkeypatch.setattr(saving, "_WRITE_BYTES", 64)
    monkeypatch.setattr(saving, "_SYNC_BYTES", 64)
    monkeypatch.setattr(saving.os, "fsync", lambda file: (time.sleep(0.05), sync(file)))
    assert len(_beats(tmp_path, monkeypatch)) >= 3


def test_a_writer_that_waits_for_other_ranks_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "first_failure", lambda failure, _: (time.sleep(0.2), failure)[1])
    assert len(_beats(tmp_path, monkeypatch)) >= 3


def test_the_memory_of_the_copy_is_used_again(tmp_path: Path) -> None:
    saver, tensors = Saver(tmp_path), _clone(OF_EVERY_KIND)
    copies = []
    for step in (1, 2, 3):
        saver.start(step, tensors, {"step": step}, keep=2)
        copies.append(saver._copy)
        assert saver.result().failure is None  # type: ignore[union-attr]
    assert copies[0] is copies[1] is copies[2]
    larger = tensors | {"model.more": torch.ones(3)}
    saver.start(4, larger, {"step": 4}, keep=2)
    assert saver.result().failure is None  # type: ignore[union-attr]
    assert set(checkpoint.shapes(tmp_path / "step-00000004")) == {"a", "b", "columns", "none", "bits", "more"}


def test_shards_are_safetensors(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, _clone(OF_EVERY_KIND), {"step": 1}, keep=1)
    stored = load_file(f"{path}/shards/00000.safetensors")
    assert set(stored) == set(OF_EVERY_KIND)
    assert all(torch.equal(stored[name], tensor) for name, tensor in OF_EVERY_KIND.items())


def _save_that_fails(rank: int, folder: Path) -> str | None:
    """Rank 1 fails with an error that nobody expects."""
    if rank == 1:
        setattr(saving, "_write_shard", lambda *_: {}["no such key"])  # noqa: B010  (this process is a rank of its own)
    saver = Saver(folder)
    saver.start(1, {"model.a": torch.ones(3)}, {"step": 1}, keep=1)
    save = saver.result()
    assert save is not None
    return save.failure


def test_any_error_of_a_rank_is_reported_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, _save_that_fails, tmp_path, timeout_s=60) == ["KeyError: 'no such key'"] * 2
    assert not list(tmp_path.iterdir())


def test_a_read_only_disk_is_named_and_the_checkpoint_before_remains(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        before = saving.save(disk / "checkpoints", 1, _clone(OF_EVERY_KIND), {"step": 1}, keep=1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(RetryableError, match=r"step-00000002 could not be saved: .*Read-only file system"):
            saving.save(disk / "checkpoints", 2, _clone(OF_EVERY_KIND), {"step": 2}, keep=1)
        assert checkpoint.newest(disk / "checkpoints") == before
    finally:
        subprocess.run(["umount", disk], check=True)


def _save_replicas(rank: int, folder: Path, replicas: int) -> int:
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    whole = torch.arange(64.0).view(16, 4)
    tensors = {"model.w": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]), "model.all": torch.ones(8)}
    path = saving.save(folder, 1, tensors, {"step": 1}, keep=1)
    assert torch.equal(checkpoint.read_model(path)["w"], whole)
    entries = json.loads((Path(path) / "manifest.json").read_text())["files"]
    headers = sum(8 + int.from_bytes((Path(path) / e["name"]).read_bytes()[:8], "little") for e in entries
                  if e["name"].endswith(".safetensors"))  # fmt: skip
    return sum(e["bytes"] for e in entries if e["name"].endswith(".safetensors")) - headers


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_write_no_byte_twice(replicas: int, tmp_path: Path) -> None:
    assert run_ranks(2, _save_replicas, tmp_path, replicas) == [4 * 64 + 4 * 8] * 2


def _load_replicas(rank: int, path: str, shape: tuple[int, ...], dims: list[str]) -> tuple[bool, int]:
    """Return whether the tensors are right, and the number of parts that this rank has read."""
    mesh = init_device_mesh("cpu", shape)
    placements = [Replicate() if dim == "replicate" else Shard(0) for dim in dims]
    tensors = {f"model.{name}": distribute_tensor(torch.zeros(16, 4), mesh, placements) for name in "abc"}
    n_read = 0
    fill = ShardFile.fill

    def counted(file: ShardFile, place: Place, blocks: Any) -> None:
        nonlocal n_read
        n_read += 1
        fill(file, place, blocks)

    setattr(ShardFile, "fill", counted)  # noqa: B010  (this process is a rank of its own)
    checkpoint.load(path, tensors)  # type: ignore[arg-type]
    whole = torch.arange(64.0).view(16, 4)
    return all(torch.equal(tensor.full_tensor(), whole) for tensor in tensors.values()), n_read


@pytest.mark.parametrize(
    ("shape", "dims", "reads"),
    [
        ((2,), ["replicate"], [3, 0]),
        pytest.param((2, 2), ["replicate", "shard"], [3, 3, 0, 0], marks=pytest.mark.slow),
        pytest.param((2, 2), ["shard", "replicate"], [3, 0, 3, 0], marks=pytest.mark.slow),
        pytest.param((2, 2), ["replicate", "replicate"], [3, 0, 0, 0], marks=pytest.mark.slow),
    ],
)
def test_replicas_read_nothing(shape: tuple[int, ...], dims: list[str], reads: list[int], tmp_path: Path) -> None:
    whole = {f"model.{name}": torch.arange(64.0).view(16, 4) for name in "abc"}
    path = saving.save(tmp_path, 1, whole, {"step": 1}, keep=1)
    assert run_ranks(len(reads), _load_replicas, path, shape, dims) == [(True, number) for number in reads]


# ---- a checkpoint of format 1 ---------------------------------------------------------------------------------------

AT_STEP_6 = {
    "0.weight": [[-0.2546398937702179], [0.7935623526573181], [-1.0637799501419067]],
    "0.bias": [-0.9899960160255432, -0.11139366775751114, 0.00027026422321796417],
    "2.weight": [[-0.28306883573532104, 0.5616642832756042, -0.31936919689178467]],
    "2.bias": [0.42653608322143555],
}
"""The weights after step 6 of the run that wrote ``format1.tar.xz``, on 2 ranks without a stop."""


def _resume(rank: int, folder: Path, world_size: int) -> dict[str, Any]:
    tree = {
        "name": "format1", "folder": str(folder), "track": {"console": False},
        "train": {"duration": "6step", "global_batch_tokens": 12, "optimizer": {"lr": 0.05},
                  "precision": {"compute": "fp32"}, "checkpoint": {"every": "3step"}, "eval_every": "1run",
                  "parallel": {"ranks": world_size}},
    }  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    job = build(from_dict(JobConfig, tree).config, model=model, loss=squared, batches=Points(rank, world_size))
    assert job.state.step == 3
    fit(job)
    return {name: value.detach().full_tensor().tolist() for name, value in job.state.model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_checkpoint_of_format_1_is_resumed(world_size: int, tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / "format1.tar.xz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    assert checkpoint.newest(tmp_path / "run/checkpoints") == str(tmp_path / "run/checkpoints/step-00000003")
    weights = run_ranks(world_size, _resume, tmp_path / "run", world_size)[0]
    assert weights.keys() == AT_STEP_6.keys()
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(AT_STEP_6[name]), rtol=1e-5, atol=1e-6)
    formats = [
        json.loads((tmp_path / f"run/checkpoints/step-0000000{n}/manifest.json").read_text())["format"] for n in (3, 6)
    ]
    assert formats == [1, 2]
    file = next((tmp_path / "run/checkpoints/step-00000003/shards").glob("__1_*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "does not match its digest" in str(manifest.fault(tmp_path / "run/checkpoints/step-00000003"))
