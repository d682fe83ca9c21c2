"""A model is never whole in memory: neither during a save or an export, nor on one of several ranks."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny_runs import TEXTS, tiny_tokenizer, write_tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config.load import dump
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import saver
from smalti.distributed.checkpoint.export import export
from smalti.distributed.group import mesh
from smalti.distributed.parallel import fsdp
from smalti.model.decoder import Decoder
from smalti.model.huggingface import open_folder, save_folder
from smalti.model.huggingface_weights import meta_weights
from smalti.model.init import draw
from smalti.train.weights import open_weights

MODEL = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=24,
    num_attention_heads=8,
)
MODEL_BYTES = 4 * sum(tensor.numel() for tensor in meta_weights(MODEL).values())
SHARD_BYTES = 25_000_000
ALLOWED_BYTES = MODEL_BYTES / 8


def _peak_bytes(work: Callable[[], Any]) -> int:
    """Return the largest increase of this process's resident memory while ``work`` runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


class Drawn(Mapping[str, Tensor]):
    """The initial weights, each drawn on access."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.shapes = {name: tensor.shape for name, tensor in Decoder(MODEL).state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return draw(name, self.shapes[name], MODEL, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _save(rank: int, folder: Path) -> int:
    options: dict[str, Any] = {"eod_id": 0, "dtype": torch.float32, "max_shard_bytes": SHARD_BYTES}
    save_folder(folder / "warm", MODEL, Drawn(), **options)  # what torch keeps after the first use is no model
    return _peak_bytes(lambda: save_folder(folder / "model", MODEL, Drawn(), **options))


def _sharded(folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = Decoder(MODEL)
    return fsdp.shard(model, mesh.build(torch.device("cpu")), compute="fp32", reduce="fp32")


def _init_from(rank: int, folder: Path) -> tuple[int, int, bool]:
    warm, model = _sharded(folder), _sharded(folder)
    own_bytes = sum(4 * parameter.numel() for parameter in model.parameters()) // 4

    def fill(empty: nn.Module) -> None:
        load = open_weights(str(folder), empty)
        empty.to_empty(device="cpu")
        load()

    fill(warm)  # stays: neither its memory nor what the first use costs counts below
    peak_bytes, drawn, same = _peak_bytes(lambda: fill(model)), Drawn(), True
    for name in ("embed.weight", "blocks.23.mlp.down_proj.weight"):
        result = model.get_parameter(name)
        assert isinstance(result, DTensor)
        same &= torch.equal(result.full_tensor(), drawn[name])
    return peak_bytes, own_bytes, same


def _write_run(rank: int, run: Path) -> None:
    model = _sharded(run)
    fsdp.materialize(model, torch.device("cpu"), lambda name, shape: draw(name, shape, MODEL, 0))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    saver.save(run / "checkpoints", 1, tensors, {"step": 1}, keep=1)


def _export(rank: int, run: Path) -> int:
    export(run, output=run / "warm")
    return _peak_bytes(lambda: export(run))


@pytest.mark.slow
def test_saving_and_loading_on_four_ranks_hold_a_rule_at_a_time(tmp_path: Path) -> None:
    assert MODEL_BYTES > 100e6
    peak_bytes = run_ranks(1, _save, tmp_path)[0]
    assert peak_bytes < ALLOWED_BYTES, peak_bytes
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    for peak_bytes, own_bytes, same in run_ranks(4, _init_from, tmp_path / "model"):
        assert peak_bytes - own_bytes < ALLOWED_BYTES, (peak_bytes, own_bytes)
        assert same


@pytest.mark.exhaustive
def test_export_of_a_checkpoint_of_several_ranks_holds_a_rule_at_a_time(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tree = {
        "name": "large",
        "model": MODEL.model_dump(),
        "data": {
            "sources": {"code": write_tokens(tmp_path / "tokens", tokenizer, TEXTS)},
            "seq_len": 32,
            "stages": [{"weights": {"code": 1}}],
        },
        "train": {"duration": "1step", "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(RunConfig.model_validate(tree)))
    tokenizer.save(run / "tokenizer")
    run_ranks(2, _write_run, run)
    peak_bytes = run_ranks(1, _export, run)[0]
    assert peak_bytes < ALLOWED_BYTES, peak_bytes
    drawn = Drawn()
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in open_folder(run / "export").tensors())
