"""Losses of tuning on two ranks, sharded or tensor parallel, in other microbatches: the gradients of one rank."""

from typing import Any

import pytest
import torch
from example_rows import pack, some_pairs
from gloo_ranks import run_ranks
from test_preference_loss import loss_of
from tiny_models import llama_config
from torch import nn
from torch.distributed.tensor import DTensor

from smalti.config.model import ModelConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.preference import DistillConfig, RewardConfig
from smalti.config.train import LossConfig, PrecisionConfig
from smalti.cost.axes import Layout
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.group.mesh import build as build_mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.gradient_sums import with_gradient_sums
from smalti.train.step import Loss, TrainState, one_by_one
from smalti.tune.distill import DistillLoss
from smalti.tune.reward.loss import RewardLoss

PAIRS = some_pairs(8)
LM = llama_config(258)
LOSSES = ("dpo", "kto", "reward", "distill")


def _model(config: ModelConfig, mesh: Mesh, seed: int) -> nn.Module:
    parallel = ParallelConfig(ranks=mesh.layout.world_size, tensor=mesh.layout.tensor)
    with torch.device("meta"):
        model: nn.Module = Decoder(config)
    model = parallelize(model, mesh, parallel, PrecisionConfig(compute="fp32"))
    fsdp.materialize(model, torch.device("cpu"), lambda name, shape: draw(name, shape, config, seed))
    return model


def _loss(kind: str, mesh: Mesh) -> Loss:
    if kind == "reward":
        return RewardLoss(RewardConfig(center_coef=0.1))
    if kind == "distill":
        teacher = _model(LM, mesh, seed=6).requires_grad_(False)
        config = DistillConfig(teacher="t", weight=0.5, temperature=2.0)
        return DistillLoss(LM, config, LossConfig(chunk_bytes=10_000), teacher, LM)
    return loss_of({"loss": kind}, chunk_bytes=10_000)


def _gradients(rank: int, layout: Layout, split: list[int]) -> dict[str, dict[str, Any]]:
    """Loss and gradients summed over the batch, by kind of loss. ``split``: pairs in each microbatch of all ranks."""
    mesh, results = build_mesh(torch.device("cpu"), layout), {}
    for kind in LOSSES:
        model = _model(LM.model_copy(update={"num_labels": 1}) if kind == "reward" else LM, mesh, seed=5)
        starts = [sum(split[:part]) for part in range(len(split))]
        microbatches = [PAIRS[start : start + size] for start, size in zip(starts, split, strict=True)]
        own = microbatches[mesh.data_rank :: layout.data_ranks]
        state = TrainState(model, torch.optim.SGD(model.parameters()), lambda step: 1.0, 1.0)
        batches = [pack([pairs], seq_len=160, dtype=torch.float32, like=PAIRS) for pairs in own]
        sums = with_gradient_sums(one_by_one, mesh)(state, batches, _loss(kind, mesh))
        gradients = {name: p.grad for name, p in model.named_parameters()}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
        total = torch.stack([each["total"].detach().double() for each in sums]).sum()
        torch.distributed.all_reduce(total)
        results[kind] = {"loss": total / layout.tensor, **whole}
    return results


@pytest.mark.exhaustive
def test_two_ranks_give_the_gradients_of_one() -> None:
    wanted = run_ranks(1, _gradients, Layout(), [8])[0]
    for layout, split in ((Layout(shard=2), [3, 5, 0, 0]), (Layout(tensor=2), [1, 7])):
        for results in run_ranks(2, _gradients, layout, split):
            for kind, values in results.items():
                for name, value in values.items():
                    difference = (value - wanted[kind][name]).norm() / wanted[kind][name].norm()
                    assert float(difference) < 1e-5, (layout, kind, name)
