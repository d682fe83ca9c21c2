"""``train.checkpoint.verify``: a disk that changes what was written fails the save, and nothing else is touched."""

import os
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks

from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint import saver as saving
from smalti.distributed.checkpoint.saver import Save, Saver
from smalti.track.checkpoints.marks import VERIFIED, is_marked


def _flip(at: str) -> None:
    """Make the disk change the last byte of a file of this name, once its pages leave the page cache."""
    evict = os.posix_fadvise

    def change(file: int, *given: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.name == at:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        evict(file, *given)

    setattr(saving.os, "posix_fadvise", change)  # noqa: B010  (this process is a rank of its own)


def _save(folder: Path, step: int, *, verify: bool = True) -> Save:
    saver = Saver(folder, verify=verify)
    saver.start(step, {"model.a": torch.full((1000,), float(step))}, {"step": step}, keep=2)
    save = saver.result()
    assert save is not None
    return save


def _save_twice(rank: int, folder: Path, at: str, of_rank: int) -> tuple[str | None, str | None]:
    first = _save(folder, 1)
    if rank == of_rank:
        _flip(at)
    return first.failure, _save(folder, 2).failure


@pytest.mark.parametrize(("at", "of_rank"), [("00000.safetensors", 0), ("index.json", 0)])
def test_a_file_that_the_disk_has_changed_fails_the_save_on_all_ranks(at: str, of_rank: int, tmp_path: Path) -> None:
    text = f"read again, shards/{at} does not match its digest: the disk has changed what was written"
    assert run_ranks(2, _save_twice, tmp_path, at, of_rank) == [(None, text)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert is_marked(tmp_path / "step-00000001", VERIFIED)
    assert checkpoint.newest(tmp_path) == str(tmp_path / "step-00000001")


def test_nothing_is_read_again_by_default(tmp_path: Path) -> None:
    save = _save(tmp_path, 1, verify=False)
    assert save.failure is None
    assert not is_marked(save.path, VERIFIED)
