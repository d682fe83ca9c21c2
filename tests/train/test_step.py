"""The update of a step depends on the global batch alone, not on its split."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig, MoEConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.train import LossConfig
from smalti.cost.axes import Layout
from smalti.distributed.group import mesh as meshes
from smalti.distributed.parallel import fsdp
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer
from smalti.train.step import TrainState, train_step

DENSE = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
MOE = ModelConfig(
    family="dbrx", norm="layernorm", vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, clip_qkv=8.0, moe=MoEConfig(num_experts=4, num_experts_per_tok=2),
)  # fmt: skip
CONFIGS = {"dense": DENSE, "moe": MOE}
ROWS, TIME = 8, 16


def _rows(seed: int = 0) -> Microbatch:
    """A global batch whose rows have unequal numbers of masked targets, one row all masked."""
    generator = np.random.default_rng(seed)
    inputs = torch.from_numpy(generator.integers(0, 64, (ROWS, TIME)))
    targets = torch.from_numpy(generator.integers(0, 64, (ROWS, TIME)))
    for row in range(ROWS):
        targets[row, : row * 2] = IGNORE
    targets[3] = IGNORE
    positions = torch.arange(TIME).expand(ROWS, TIME).contiguous()
    documents = (positions >= 5).long()
    return Microbatch(inputs, targets, positions, documents)


def _cut(rows: Microbatch, world_size: int, rank: int, microbatches: int) -> list[Microbatch]:
    mine = [tensor.chunk(world_size)[rank].chunk(microbatches) for tensor in rows[:4]]
    return [Microbatch(*parts) for parts in zip(*mine, strict=True)]


def _gradients_after_step(rank: int, config: ModelConfig, microbatches: int, replicate: int = 1) -> dict[str, Any]:
    world_size = dist.get_world_size()
    device = torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(config)
    mesh = meshes.build(device, Layout(replicate, dist.get_world_size() // replicate))
    fsdp.shard(model, mesh, compute="fp32", reduce="fp32")
    fsdp.materialize(model, device, lambda name, shape: draw(name, shape, config, 1))
    state = TrainState(model, build_optimizer(model, OptimizerConfig(lr=1e-3)), lambda step: 1e-3, clip_norm=0.5)
    result = train_step(state, _cut(_rows(), world_size, rank, microbatches), LanguageLoss(config, LossConfig()))
    full = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    after = {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}
    return {
        "gradients": full,
        "parameters": after,
        "loss": float(result.loss),
        "weight": float(result.weight),
        "norm": float(result.grad_norm),
        "metrics": {name: value.tolist() for name, value in result.metrics.items()},
    }


@cache
def _whole(kind: str) -> dict[str, Any]:
    """Of one rank."""
    results: dict[str, Any] = run_ranks(1, _gradients_after_step, CONFIGS[kind], 4)[0]
    return results


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "microbatches", "kind"),
    [
        (2, 2, "moe"),
        *(pytest.param(ranks, 1, kind, marks=pytest.mark.slow) for ranks in (2, 4) for kind in CONFIGS),
        pytest.param(2, 2, "dense", marks=pytest.mark.slow),
    ],
)
def test_any_split_gives_the_same_gradients(world_size: int, microbatches: int, kind: str) -> None:
    whole = _whole(kind)
    split = run_ranks(world_size, _gradients_after_step, CONFIGS[kind], microbatches)[0]
    assert split["weight"] == whole["weight"] == float((_rows().targets != IGNORE).sum())
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert split["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    for name, value in whole["metrics"].items():
        np.testing.assert_allclose(split["metrics"][name], value, rtol=1e-5, err_msg=name)
    for name, gradient in whole["gradients"].items():
        assert _relative(split["gradients"][name], gradient) < 2e-5, name


@pytest.mark.exhaustive
def test_replicated_shards_give_the_same_gradients() -> None:
    whole = run_ranks(1, _gradients_after_step, MOE, 1)[0]
    hybrid = run_ranks(4, _gradients_after_step, MOE, 1, 2)[0]
    assert hybrid["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    for name, gradient in whole["gradients"].items():
        assert _relative(hybrid["gradients"][name], gradient) < 2e-5, name


def _plain_reference(config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """One process, float64, no FSDP, textbook losses: mean over all targets of the batch, gradient clipped to 0.5."""
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, config, 1))
    model = model.double()
    rows = _rows()
    logits = model(rows.inputs, rows.positions, rows.documents, mask_BT=rows.targets != IGNORE)
    loss = torch.nn.functional.cross_entropy(logits.value.flatten(0, 1), rows.targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradient_equals_a_naive_float64_reference() -> None:
    loss, gradients = _plain_reference(DENSE)
    ours = run_ranks(1, _gradients_after_step, DENSE, 4)[0]
    assert ours["loss"] == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert _relative(ours["gradients"][name], gradient) < 1e-5, name


def _dtypes(rank: int) -> dict[str, set[torch.dtype]]:
    """What weights and activations are in, inside the forward of a mixture of experts that computes in bf16."""
    device, seen = torch.device("cpu"), {"router": set(), "expert": set()}
    with torch.device("meta"):
        model = Decoder(MOE)
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(
                lambda m, _, out: seen["router"].update({m.weight.dtype, out.logits_BTE.dtype})
            )
        if name.endswith("mlp.experts"):
            module.register_forward_hook(lambda m, _, out: seen["expert"].update({m.up_proj.dtype}))
    fsdp.shard(model, meshes.build(device), compute="bf16", reduce="fp32")
    fsdp.materialize(model, device, lambda name, shape: draw(name, shape, MOE, 1))
    state = TrainState(model, build_optimizer(model, OptimizerConfig(lr=1e-3)), lambda step: 1e-3, clip_norm=1.0)
    train_step(state, [_rows()], LanguageLoss(MOE, LossConfig()))
    return seen


@pytest.mark.slow
def test_the_router_stays_in_fp32_where_the_rest_computes_in_bf16() -> None:
    for world_size in (1, 2):
        seen = run_ranks(world_size, _dtypes)[0]
        assert seen == {"router": {torch.float32}, "expert": {torch.bfloat16}}


def test_a_microbatch_of_no_tokens_is_refused_by_name() -> None:
    nothing = torch.zeros(0, TIME, dtype=torch.int64)
    with pytest.raises(UserError, match="a microbatch has 0 x 16 tokens") as caught:
        LanguageLoss(DENSE, LossConfig())(Decoder(DENSE), Microbatch(nothing, nothing, nothing, None))
    assert "IGNORE" in str(caught.value.hint)
