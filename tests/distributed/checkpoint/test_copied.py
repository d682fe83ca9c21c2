"""Weights of a copy in an object store: those of the checkpoint to the bit, whatever its shards and parts."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from made_copies import opened
from s3_buckets import Bucket
from tiny_runs import add_checkpoint, require_same_export, tiny_run
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from smalti.base.errors import DataError, SmaltiError, UserError
from smalti.base.objects import Requests, open_folder
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint, copied, saver
from smalti.distributed.checkpoint.copied import CopiedModel
from smalti.distributed.checkpoint.export import export
from smalti.model.huggingface import load_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _save(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.rows": distribute_tensor(
            torch.randn(701, 33, generator=generator), mesh, [Shard(0)], src_data_rank=None
        ),
        "model.columns": distribute_tensor(
            torch.randn(9, 77, generator=generator), mesh, [Shard(1)], src_data_rank=None
        ),
        "model.half": torch.arange(9).to(torch.bfloat16),
        "model.none": torch.empty(0, 3),
        "model.scalar": torch.tensor(3),
        "optimizer.rows.ema": torch.ones(701, 33),
    }
    return saver.save(folder, 4, tensors, {"step": 4}, keep=1)


def test_the_weights_are_those_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_ranks(2, _save, tmp_path)[0]
    url = f"memory://{tmp_path.name}/a"
    opened(url).upload(path)
    monkeypatch.setattr(copied, "_CACHED_PARTS", 2)
    model, expected = CopiedModel.open(url, None), checkpoint.read_model(path)
    assert (model.step, set(model)) == (4, set(expected))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.items())
    assert len(model._parts) == 2
    assert torch.equal(CopiedModel.open(url, 4, ema=True)["rows"], torch.ones(701, 33))
    with pytest.raises(UserError, match="has no complete checkpoint of step 5"):
        CopiedModel.open(url, 5)


def test_an_export_from_a_store_is_that_of_the_folder(tmp_path: Path, s3: Bucket) -> None:
    run = tiny_run(tmp_path)
    opened(s3.url).upload(run / "checkpoints/step-00000020", config=(run / "config.yaml").read_text())
    expected = load_folder(export(run, output=tmp_path / "here")).state_dict()
    (run / "checkpoints/step-00000020").rename(tmp_path / "gone")
    folder = Path(export(run, output=tmp_path / "there", checkpoints=s3.url))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_folder(folder).state_dict().items())
    assert json.loads((folder / "export.json").read_text())["step"] == 20
    with pytest.raises(UserError, match="has no complete checkpoint of step 21"):
        export(run, step=21, checkpoints=s3.url)
    with pytest.raises(SmaltiError, match="does not exist"):
        export(run, checkpoints="s3://no-such-bucket/a")

    part = max(s3.objects(), key=lambda key: s3.objects()[key])
    data = s3.read(part)
    s3.write(part, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataError, match="does not match its digest"):
        export(run, output=tmp_path / "damaged", checkpoints=s3.url)
    assert not (tmp_path / "damaged").exists()


def test_an_export_from_a_store_is_of_the_best_copy(tmp_path: Path) -> None:
    run, url = tiny_run(tmp_path), f"memory://{tmp_path.name}/a"
    add_checkpoint(run, load(RunConfig, str(run)).config, 24)
    for path in (run / "checkpoints").glob("step-*"):
        opened(url).upload(path)

    def exported_step(name: str) -> int:
        folder = Path(export(run, output=tmp_path / name, checkpoints=url))
        return int(json.loads((folder / "export.json").read_text())["step"])

    assert exported_step("newest") == 24
    for step, expected in ((20, 20), (16, 24)):  # that of step 16 was deleted
        best = {"name": f"step-{step:08d}", "metric": "metrics/eval/prose/LanguageCrossEntropy", "value": 1.0}
        open_folder(url, Requests(5000.0)).put("best", json.dumps(best).encode())
        assert exported_step(f"best-{step}") == expected


def test_an_average_from_a_store_is_that_of_the_folder(
    tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint holds no more parts in memory than one alone."""
    run = tiny_run(tmp_path)
    config = load(RunConfig, str(run)).config
    for step in (24, 28, 32):
        add_checkpoint(run, config, step)
    for path in (run / "checkpoints").glob("step-*"):
        opened(s3.url).upload(path, config=(run / "config.yaml").read_text())
    expected = Path(export(run, step=28, average="last:3", output=tmp_path / "here"))
    (run / "checkpoints").rename(tmp_path / "gone")
    monkeypatch.setattr(copied, "_CACHED_PARTS", 2)
    part, steps = CopiedModel._part, set[int]()

    def counted(model: CopiedModel, file: str, number: int) -> bytes:
        data = part(model, file, number)
        steps.add(model.step)
        assert len(model._parts) <= 2
        return data

    monkeypatch.setattr(CopiedModel, "_part", counted)
    folder = Path(export(run, step=28, average="last:3", output=tmp_path / "there", checkpoints=s3.url))
    require_same_export(folder, expected)
    assert steps == {20, 24, 28}
    assert json.loads((folder / "export.json").read_text())["averaged_steps"] == [20, 24, 28]
    with pytest.raises(UserError, match="has 4 checkpoints up to step 32") as raised:
        export(run, average="last:9", checkpoints=s3.url)
    assert raised.value.hint is not None
    assert "train.checkpoint.save_to_keep=9" in raised.value.hint
