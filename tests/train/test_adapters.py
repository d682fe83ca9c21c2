"""Runs that train adapters: the base is loaded and frozen, and ranks agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint.export import export
from smalti.model.adapters.apply import is_adapter
from smalti.model.decoder import Decoder
from smalti.model.huggingface import save
from smalti.model.init import init_weights
from smalti.track.checkpoints import manifest
from smalti.train import Hook, build, fit


def tuned(root: Path, kind: str = "dense", *, adapter: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """A run that trains adapters beside the weights of ``root``/base, which are drawn where they are missing."""
    tree = toy_run.config(root, kind, **{"duration": "4step", "checkpoint": {"every": "2step"}, **train}).model_dump()
    if kind == "dense":
        tree["model"]["family"] = "llama"
    config = from_dict(RunConfig, tree, "toy").config
    if not (root / "base").exists():
        model = Decoder(config.model)
        init_weights(model, config.model, seed=3)
        save(model, root / "base")
    tree |= {"init_from": str(root / "base"), "adapter": {"rank": 4, "alpha": 8} | (adapter or {})}
    return from_dict(RunConfig, tree, "toy").config


@pytest.mark.slow
def test_base_is_frozen_and_only_adapters_are_saved(tmp_path: Path) -> None:
    config = tuned(tmp_path, "moe", adapter={"layers": [1, 1]}, duration="2step")
    job = build(config)
    before = {name: tensor.full_tensor().clone() for name, tensor in job.state.model.state_dict().items()}
    fit(job)
    for name, tensor in job.state.model.state_dict().items():
        same = torch.equal(tensor.full_tensor(), before[name])
        assert same != is_adapter(name), name
        assert not is_adapter(name) or name.startswith("blocks.1.")
    path = tmp_path / "runs/moe/checkpoints/step-00000002"
    assert all(map(is_adapter, checkpoint.shapes(path)))
    assert all("lora" in name for name in job.tensors())
    assert manifest.read_state(path)["base"]["init_from"] == str(tmp_path / "base")


class Losses(Hook):
    """Keeps each step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, job: Any, result: Any) -> None:
        self.values.append(float(result.loss))


def _train(rank: int, config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = Losses()
    job = build(config, hooks=[losses])
    fit(job)
    weights = {name: tensor.full_tensor() for name, tensor in job.state.model.state_dict().items() if is_adapter(name)}
    return losses.values, weights


@pytest.mark.slow
def test_other_base_is_refused(tmp_path: Path) -> None:
    config = tuned(tmp_path, duration="2step")
    fit(build(config))
    model = Decoder(config.model)
    init_weights(model, config.model, seed=4)
    save(model, tmp_path / "base")
    with pytest.raises(DataError, match="trained beside other weights than those of"):
        build(config)


@pytest.mark.slow
def test_adapters_are_no_base(tmp_path: Path) -> None:
    config = tuned(tmp_path, duration="2step")
    fit(build(config))
    again = config.model_copy(update={"name": "again", "folder": None, "init_from": config.folder})
    with pytest.raises(DataError, match="holds adapters, not a whole model"):
        build(again.model_copy(update={"folder": str(tmp_path / "again")}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"targets": ["attn"]}}, "'attn' is no matrix of layers 0 to 1"),
        ({"adapter": {"targets": ["experts"]}}, "'experts' is no matrix"),
        ({"adapter": {"layers": [0, 2]}}, "the model has 2 layers"),
        ({"adapter": {"rank": 4096}}, "adapter.rank=4096: the matrices have at most rank"),
        ({"init_from": None}, "an adapter without init_from"),
    ],
)
def test_impossible_adapter_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tree = tuned(tmp_path).model_dump()
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=message):
        from_dict(RunConfig, tree, "toy")


@pytest.mark.slow
def test_training_starts_from_an_adapter_folder(tmp_path: Path) -> None:
    first = tuned(tmp_path, duration="2step")
    fit(build(first))
    folder = export(first.run_folder, output=tmp_path / "adapter")
    trained = checkpoint.read_model(tmp_path / "runs/dense/checkpoints/step-00000002")
    tree = first.model_dump() | {"name": "second", "folder": str(tmp_path / "second")}
    tree["adapter"] |= {"init_from": folder}
    job = build(from_dict(RunConfig, tree, "toy").config)
    state = job.state.model.state_dict()
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in trained.items())
    tree["adapter"] |= {"rank": 2}
    tree["folder"] = str(tmp_path / "third")
    with pytest.raises(UserError, match=r"q_proj.lora_A' is \(4, 32\) there and \(2, 32\) here"):
        build(from_dict(RunConfig, tree, "toy").config)
    tree["adapter"] |= {"rank": 4, "alpha": 4}
    tree["folder"] = str(tmp_path / "fourth")
    with pytest.raises(UserError, match="the scale is 2 there and 1 here"):
        build(from_dict(RunConfig, tree, "toy").config)
