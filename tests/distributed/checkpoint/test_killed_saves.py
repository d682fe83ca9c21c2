"""kill -9 of one rank or of all while checkpoints are saved: the newest complete one always loads, and is whole."""

import os
import random
import shutil
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import server
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint.saver import Saver
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import step_of
from smalti.track.checkpoints.retention import make_room

RANKS = 2


def _tensors(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        f"model.{number}": distribute_tensor(torch.full((64, 1024 + number), value), mesh, [Shard(0)])
        for number in range(16)
    }


def _save_without_end(rank: int, rendezvous: str, folder: str) -> None:
    """Save one checkpoint after the other, each filled with its step, and change the tensors as soon as they may be."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    newest = checkpoint.newest(folder, shared=True)
    tensors, saver = _tensors(0.0), Saver(folder, make_room=lambda: make_room(Path(folder)))
    for step in range(step_of(newest) + 1 if newest else 1, 10_000):
        for tensor in tensors.values():
            tensor.to_local().fill_(step)  # type: ignore[attr-defined]
        saver.start(step, tensors, {"step": step}, keep=2)
        saver.wait_copied()
        for tensor in tensors.values():
            tensor.to_local().fill_(-1.0)  # type: ignore[attr-defined]
        save = saver.result()
        assert save is not None
        assert save.failure is None, save.failure


def _attempt(folder: Path, saved: int, after_s: float, killed: tuple[int, ...]) -> None:
    """Start the ranks, wait for a checkpoint after ``saved``, and kill after some time; the other rank ends too."""
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            server().Process(target=_save_without_end, args=(rank, f"{place}/rendezvous", str(folder)), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while _newest_step(folder) <= saved and time.monotonic() < deadline:
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.005)
        time.sleep(after_s)
        for rank in killed:
            os.kill(ranks[rank].pid or 0, signal.SIGKILL)
        time.sleep(0.05)  # the other one meets a group that is broken
        for process in ranks:
            process.kill()
            process.join()


def _newest_step(folder: Path) -> int:
    return max((step_of(path.parent) for path in folder.glob("step-*/COMPLETE")), default=0)


@pytest.mark.slow  # processes
def test_the_newest_checkpoint_loads_after_a_kill_at_any_moment(tmp_path: Path, proof: Any, record: Any) -> None:
    kills = proof(short=4, full=100)
    generator = random.Random(20)
    folder, saved, counts = tmp_path / "checkpoints", 0, {"one rank": 0, "all ranks": 0, "temporary folders": 0}
    for _ in range(kills):
        killed = generator.choice([(0,), (1,), (0, 1)])
        _attempt(folder, saved, generator.uniform(0, 0.15), killed)
        counts["all ranks" if len(killed) == RANKS else "one rank"] += 1
        leftovers = [path for path in folder.iterdir() if path.name.startswith(".")]
        counts["temporary folders"] += len(leftovers)
        assert len(leftovers) <= 1, "of the save that was killed: the next one removes it"
        newest = checkpoint.newest(folder)
        assert newest is not None
        assert step_of(newest) > saved
        saved = step_of(newest)
        assert manifest.read_state(newest)["step"] == saved
        assert all(tensor.eq(saved).all() for tensor in checkpoint.read_model(newest).values())
    _attempt(folder, saved + 1, 0.0, (0, 1))  # the first of its checkpoints has deleted the older ones by then
    assert len(list(folder.glob("step-*"))) <= 4
    record("checkpoint_kills", {"kills": kills, **counts, "last_step": saved})
    shutil.rmtree(folder)
