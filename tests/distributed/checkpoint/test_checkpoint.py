"""Checkpoints: read back to the bit on any number of ranks; damage found; nothing but tensors unpickled."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from smalti.base.errors import DataError, RetryableError
from smalti.distributed.checkpoint import checkpoint, saver
from smalti.distributed.checkpoint.shard_reader import ShardReader
from smalti.track.checkpoints import manifest


def _whole() -> dict[str, torch.Tensor]:
    """A matrix that no number of ranks divides, a vector shorter than the ranks, a scalar that all hold."""
    generator = torch.Generator().manual_seed(5)
    matrix, vector = torch.randn(7, 3, generator=generator), torch.randn(2, generator=generator)
    return {"model.matrix": matrix, "model.vector": vector, "optimizer.step": torch.tensor(3.0)}


def _tensors(fill: float | None = None) -> dict[str, torch.Tensor]:
    """The same, the first two cut over the ranks."""
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), _whole()
    if fill is not None:
        whole = {name: torch.full_like(tensor, fill) for name, tensor in whole.items()}
    for name in ("model.matrix", "model.vector"):
        whole[name] = distribute_tensor(whole[name], mesh, [Shard(0)], src_data_rank=None)
    return whole


def _save(rank: int, folder: Path, steps: tuple[int, ...] = (10,), keep: int = 2) -> str:
    path = ""
    for step in steps:
        path = saver.save(folder, step, _tensors(), {"step": step}, keep=keep)
    return path


def _load(rank: int, path: str) -> dict[str, list[Any]]:
    tensors = _tensors(fill=-1.0)
    checkpoint.load(path, tensors)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("saved_by", "read_by"), [(1, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (3, 2)))]
)
def test_read_back_to_the_bit_on_other_ranks(saved_by: int, read_by: int, tmp_path: Path) -> None:
    path = run_ranks(saved_by, _save, tmp_path)[0]
    want = {name: tensor.tolist() for name, tensor in _whole().items()}
    assert all(result == want for result in run_ranks(read_by, _load, path))
    plain = checkpoint.read_model(path)
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {
        "matrix": want["model.matrix"],
        "vector": want["model.vector"],
    }
    assert manifest.read_state(path) == {"step": 10}
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run_ranks(1, _save, tmp_path, (5, 10, 15, 20))
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-00000015", "step-00000020"]


def test_a_link_to_a_checkpoint_of_another_run_is_taken_away_and_not_followed(tmp_path: Path) -> None:
    path = run_ranks(1, _save, tmp_path / "other")[0]
    (tmp_path / "own").mkdir()
    (tmp_path / "own/step-00000010").symlink_to(path)
    run_ranks(1, _save, tmp_path / "own", (15, 20))
    assert sorted(path.name for path in (tmp_path / "own").glob("*step-*")) == ["step-00000015", "step-00000020"]
    assert checkpoint.fault(path) is None


def test_a_folder_that_was_moved_is_not_made_again_by_a_save(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_ranks(1, _save, tmp_path / "run/checkpoints")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(AssertionError, match="could not be saved"):
        run_ranks(1, _save, tmp_path / "run/checkpoints", (20,))
    assert not (tmp_path / "run").exists()


def _newest(rank: int, folder: Path) -> str | None:
    return checkpoint.newest(folder, shared=True)


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path: Path) -> None:
    run_ranks(1, _save, tmp_path)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000060")
    rejected: list[tuple[str, str]] = []
    assert checkpoint.newest(tmp_path, lambda *rejection: rejected.append(rejection)) == str(tmp_path / "step-00000010")
    assert "checkpoint of step 10" in rejected[0][1]
    assert run_ranks(2, _newest, tmp_path) == [str(tmp_path / "step-00000010")] * 2
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "best")
    assert checkpoint.fault(tmp_path / "best") is None


def _damage_truncate(path: Path) -> None:
    file = next(path.glob("shards/00000*"))
    file.write_bytes(file.read_bytes()[:-1])


def _damage_flip(path: Path) -> None:
    file = next(path.glob("shards/00000*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _damage_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "truncated": _damage_truncate,
    "flipped bit": _damage_flip,
    "manifest": _damage_manifest,
    "missing file": lambda path: (path / "train_state.json").unlink(),
    "index": lambda path: (path / "shards" / "index.json").write_bytes(b"x"),
    "no mark": lambda path: (path / "COMPLETE").unlink(),
}


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, _save, folder, (5, 10))
    return folder


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage: Any, two_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    newest = str(tmp_path / "step-00000010")
    damage(Path(newest))
    rejected: list[tuple[str, str]] = []
    chosen = checkpoint.newest(tmp_path, lambda path, reason: rejected.append((path, reason)))
    assert chosen == str(tmp_path / "step-00000005")
    assert rejected or not (Path(newest) / "COMPLETE").exists()
    with pytest.raises(DataError, match="cannot be used"):
        checkpoint.read_model(newest)


def _find_together(rank: int, folder: Path, unreadable: int | None = None) -> tuple[Any, list[Any], list[str]]:
    """Return the checkpoint that this rank finds, what it rejects, and the files that it reads."""
    read: list[str] = []

    def look(path: Path) -> str:
        read.append(str(path.relative_to(folder)))
        if rank == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return digest_of[path.name == "manifest.json"](path)

    digest_of = (manifest.xxh3_file, manifest.sha256_file)
    for name in ("xxh3_file", "sha256_file"):
        setattr(manifest, name, look)  # this process is a rank of its own
    rejected: list[tuple[str, str]] = []
    try:
        chosen: Any = checkpoint.newest(folder, lambda path, reason: rejected.append((path, reason)), shared=True)
    except RetryableError as error:
        chosen = str(error)
    return chosen, rejected, read


@pytest.mark.sample(1)
@pytest.mark.parametrize("by_rank", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2))])
def test_ranks_share_the_reading_and_find_the_same(by_rank: int, tmp_path: Path) -> None:
    newest = Path(run_ranks(3, _save, tmp_path, (5, 10))[0])
    dealt = run_ranks(3, _find_together, tmp_path)
    assert [result[:2] for result in dealt] == [(str(newest), [])] * 3
    read = [name for result in dealt for name in result[2]]
    written = {str(path.relative_to(tmp_path)) for path in newest.rglob("*") if path.is_file()}
    assert sorted(read) == sorted(written - {"step-00000010/COMPLETE"}), "each file is read once, by one rank"
    assert all(any(".safetensors" in name for name in result[2]) for result in dealt)

    damaged = next(name for name in dealt[by_rank][2] if ".safetensors" in name)
    data = (tmp_path / damaged).read_bytes()
    (tmp_path / damaged).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    reason = f"{damaged.partition('/')[2]} does not match its digest"
    for chosen, rejected, _ in run_ranks(3, _find_together, tmp_path):
        assert chosen == str(tmp_path / "step-00000005")
        assert rejected == [(str(newest), reason)]


def test_a_rank_that_cannot_read_its_part_is_reported_to_all(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path)
    for error, rejected, _ in run_ranks(2, _find_together, tmp_path, 1):
        assert "cannot be read" in error
        assert not rejected


def test_an_empty_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None
    assert checkpoint.newest(tmp_path) is None


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_metadata_may_name_no_other_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run_ranks(1, _save, tmp_path)[0])
    (path / "shards" / "index.json").unlink()  # as in format 1
    (path / "shards" / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(DataError, match="not allowed"):
        ShardReader(path / "shards").read_metadata()
    assert "unpickled" not in capsys.readouterr().out


def _save_onto_a_file(rank: int, folder: Path) -> str:
    with pytest.raises(RetryableError) as raised:
        saver.save(folder / "file", 10, _tensors(), {}, keep=1)
    return str(raised.value)


def test_a_save_that_fails_says_so_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = run_ranks(2, _save_onto_a_file, tmp_path)
    assert all(
        "step-00000010 could not be saved" in message and "the disk at /" in message and "hint:" in message
        for message in messages
    )


def _wrong_shape(rank: int, path: str) -> str:
    with pytest.raises(DataError) as raised:
        checkpoint.load(path, {"model.matrix": torch.zeros(3, 3)})
    with pytest.raises(DataError, match=r"has no tensor 'model\.other'"):
        checkpoint.load(path, {"model.other": torch.zeros(3, 3)})
    return str(raised.value)


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = run_ranks(1, _save, tmp_path)[0]
    assert "(7, 3)" in run_ranks(1, _wrong_shape, path)[0]
