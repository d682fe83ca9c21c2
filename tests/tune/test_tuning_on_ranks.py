"""Losses of tuning on two ranks, sharded or tensor parallel, on rows of the stream: the gradients of one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_rows import some_pairs
from gloo_ranks import run_ranks
from test_preference_loss import loss_of
from test_preference_reference import _example
from tiny_models import llama_config
from tiny_runs import tiny_tokenizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config.adapter import AdapterConfig
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.preference import DistillConfig, PreferenceConfig, RewardConfig
from smalti.config.train import LossConfig, PrecisionConfig
from smalti.cost.axes import Layout
from smalti.data.examples.folder import write_examples
from smalti.data.stream.stream import Stream
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.group.mesh import build as build_mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.adapters import lora
from smalti.model.adapters.apply import apply
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import Microbatch, to_microbatch
from smalti.train.gradient_sums import with_gradient_sums
from smalti.train.step import Loss, TrainState, one_by_one
from smalti.tune.distill import DistillLoss
from smalti.tune.preference.loss import preference_loss
from smalti.tune.preference.reference import LiveReference
from smalti.tune.reward.loss import RewardLoss

LM = llama_config(320)
SEQ_LEN, ROWS = 14, 5
LOSSES = ("dpo", "kto", "reward", "distill", "dpo with adapters", "reward with adapters")


def _model(config: ModelConfig, mesh: Mesh, seed: int, *, adapted: bool = False) -> nn.Module:
    parallel = ParallelConfig(ranks=mesh.layout.world_size, tensor=mesh.layout.tensor)
    with torch.device("meta"):
        model: nn.Module = Decoder(config)
        if adapted:
            apply(model, AdapterConfig(rank=4))
    model = parallelize(model, mesh, parallel, PrecisionConfig(compute="fp32"))
    fsdp.materialize(model, torch.device("cpu"), lambda name, shape: _value(name, shape, config, seed))
    return model


def _value(name: str, shape: Any, config: ModelConfig, seed: int) -> Tensor:
    """The initial value of a parameter, of B of an adapter as of A: it begins at 0."""
    return (
        lora.draw(name.replace("lora_B", "lora_A"), shape, seed) if "lora" in name else draw(name, shape, config, seed)
    )


def _loss(kind: str, mesh: Mesh) -> Loss:
    if kind.startswith("reward"):
        return RewardLoss(RewardConfig(center_coef=0.1))
    if kind == "distill":
        teacher = _model(LM, mesh, seed=6).requires_grad_(False)
        config = DistillConfig(teacher="t", weight=0.5, temperature=2.0)
        return DistillLoss(LM, config, LossConfig(chunk_bytes=10_000), teacher, LM)
    if kind == "dpo with adapters":
        return preference_loss(LM, PreferenceConfig(), LossConfig(), LiveReference(None, LossConfig(), None))
    return loss_of({"loss": kind}, chunk_bytes=10_000)


def _microbatches(folder: str, mesh: Mesh, rows: int) -> list[Microbatch]:
    """This rank's part of an epoch, ``rows`` rows in each microbatch; a rank with too few rows has an empty one."""
    tree = {"sources": {"pairs": folder}, "seq_len": SEQ_LEN, "stages": [{"weights": {"pairs": 1}}]}
    length = RunLength(1, ((0, ROWS * SEQ_LEN),))
    share = {"rank": mesh.data_rank, "world_size": mesh.layout.data_ranks, "microbatch_tokens": rows * SEQ_LEN}
    stream = Stream(from_dict(DataConfig, tree).config, seed=3, length=length, **share)
    assert stream.epoch_tokens("pairs") == ROWS * SEQ_LEN
    return [to_microbatch(batch, torch.device("cpu"), mask_documents=True) for batch in stream.batch(0)]


def _gradients(rank: int, folder: str, layout: Layout, rows: int) -> dict[str, dict[str, Any]]:
    """Loss and gradients summed over the batch, by kind of loss. ``rows``: of each microbatch."""
    mesh, results = build_mesh(torch.device("cpu"), layout), {}
    batches = _microbatches(folder, mesh, rows)
    for kind in LOSSES:
        config = LM.model_copy(update={"num_labels": 1 if kind.startswith("reward") else None})
        model = _model(config, mesh, seed=5, adapted=kind.endswith("adapters"))
        state = TrainState(model, torch.optim.SGD(model.parameters()), lambda step: 1.0, 1.0)
        sums = with_gradient_sums(one_by_one, mesh)(state, batches, _loss(kind, mesh))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
        total = torch.stack([each["total"].detach().double() for each in sums]).sum()
        torch.distributed.all_reduce(total)
        results[kind] = {"loss": total / layout.tensor, **whole}
    return results


@pytest.mark.exhaustive
def test_two_ranks_give_the_gradients_of_one(tmp_path: Path) -> None:
    examples = [replace(_example(pair, n), values=pair.values) for n, pair in enumerate(some_pairs(8))]
    write_examples(tmp_path / "pairs", examples, tiny_tokenizer())
    folder = str(tmp_path / "pairs")
    wanted = run_ranks(1, _gradients, folder, Layout(), ROWS)[0]
    for layout, rows in ((Layout(shard=2), 1), (Layout(tensor=2), 2)):
        for results in run_ranks(2, _gradients, folder, layout, rows):
            for kind, values in results.items():
                for name, value in values.items():
                    difference = (value - wanted[kind][name]).norm() / wanted[kind][name].norm()
                    # chosen and rejected answers cancel, more so in the gradients of adapters
                    assert float(difference) < (1e-4 if "lora" in name else 1e-5), (layout, kind, name)
