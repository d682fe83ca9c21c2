"""Optimizers: Lion equals its definition in float64, on any number of ranks, and resumes exactly."""

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from pydantic import ValidationError
from torch import Tensor, nn

from smalti.base.errors import RetryableError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.run import RunConfig
from smalti.distributed.group import mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.dtensors import local
from smalti.model.decoder import Decoder
from smalti.track.sinks.jsonl import read_metrics
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.optim import build_optimizer, decays, moments
from smalti.train.step import StepResult, train_step

LION = OptimizerConfig.model_validate({"name": "lion", "lr": 1e-3, "weight_decay": 0.5})
ADAMW = OptimizerConfig(lr=1e-3, weight_decay=0.5)


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.embed = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))


def _gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 100 + len(name)))


def _after(rank: int, config: OptimizerConfig, steps: int, shards: bool = False) -> dict[str, Tensor]:
    """Weights and moments after ``steps`` of made gradients; over the ranks of this world where ``shards``."""
    model: nn.Module = _Toy()
    if shards:
        fsdp.shard(model, mesh.build(torch.device("cpu")), compute="fp32", reduce="fp32")
    optimizer = build_optimizer(model, config)
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            fsdp.assign(parameter.grad, _gradient(name, parameter.shape, step))
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 + step % 5)
        optimizer.step()
    tensors = {**dict(model.named_parameters()), **moments(model, optimizer)}
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().detach() for name, value in tensors.items()
    }


def _naive_lion(config: OptimizerConfig, steps: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in _Toy().named_parameters():
        weight, moment = parameter.detach().double(), torch.zeros(parameter.shape, dtype=torch.float64)
        decay = config.weight_decay if name == "matrix" else 0.0
        for step in range(steps):
            gradient, lr = _gradient(name, parameter.shape, step).double(), config.lr * (1 + step % 5)
            direction = torch.sign(config.betas[0] * moment + (1 - config.betas[0]) * gradient)
            weight = weight - lr * (direction + decay * weight)
            moment = config.betas[1] * moment + (1 - config.betas[1]) * gradient
        tensors[name], tensors[f"optimizer.{name}.exp_avg"] = weight, moment
    return tensors


def test_lion_is_the_published_rule() -> None:
    ours, naive = _after(0, LION, 50), _naive_lion(LION, 50)
    assert set(ours) == set(naive)
    for name, value in naive.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("config", [LION, ADAMW], ids=["lion", "adamw"])
def test_shards_are_updated_as_the_whole(config: OptimizerConfig) -> None:
    whole, sharded = _after(0, config, 5), run_ranks(2, _after, config, 5, True)[0]
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_moments_exist_from_the_start_and_are_those_of_the_rule() -> None:
    model = _Toy()
    model.bias.requires_grad_(False)
    assert set(moments(model, build_optimizer(model, LION))) == {
        "optimizer.matrix.exp_avg", "optimizer.embed.exp_avg",
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name in moments(model, build_optimizer(model, ADAMW))} == {
        "step", "exp_avg", "exp_avg_sq",
    }  # fmt: skip


def test_matrices_decay_and_norms_biases_and_the_embedding_do_not() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "mlp_only_layers": [0]}
    config = ModelConfig.model_validate(
        {"family": "decoder", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "attention_bias": True, "mlp_bias": True, "qk_norm": "full", "embedding_norm": True,
         "moe": moe}
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(config)
    spared = {re.sub(r"blocks\.\d\.", "", name) for name, value in model.named_parameters() if not decays(name, value)}
    assert spared == {
        "embed.weight", "embedding_norm.weight", "norm.weight", "attention_norm.weight", "mlp_norm.weight",
        *(f"attention.{one}_norm.weight" for one in "qk"), *(f"attention.{one}_proj.bias" for one in "qkvo"),
        *(f"mlp.{one}_proj.bias" for one in ("gate", "up", "down")),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_routers_learn_at_a_fraction_of_the_rate(name: Any, tmp_path: Path) -> None:
    """The first update of both rules is the rate times the sign of the gradient."""
    updates = {}
    for frac in (1.0, 0.25):
        config = toy_run.config(tmp_path, "moe", optimizer={"name": name, "lr": 1e-3, "weight_decay": 0})
        tree = config.model_dump(mode="json", exclude_unset=True)
        tree["folder"] = str(tmp_path / str(frac))
        tree["model"]["moe"]["router_lr_frac"] = frac
        job = build(from_dict(RunConfig, tree, "toy").config)
        weights = {name: local(value) for name, value in job.state.model.named_parameters()}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        train_step(job.state, job.batches.batch(0), job.loss)
        updates[frac] = {name: weight.detach() - before[name] for name, weight in weights.items()}
    for parameter, update in updates[1.0].items():
        frac = 0.25 if parameter.endswith("router.weight") else 1.0
        torch.testing.assert_close(updates[0.25][parameter], update * frac, rtol=1e-2, atol=1e-7)
    assert sum(parameter.endswith("router.weight") for parameter in updates[1.0]) == 2


def test_lion_has_defaults_of_its_own_and_no_eps() -> None:
    assert (LION.betas, LION.eps) == ((0.9, 0.99), None)
    assert OptimizerConfig.model_validate(LION.model_dump()) == LION
    with pytest.raises(ValidationError, match="eps=1e-08 has no effect: optimizer 'lion' has no second moment"):
        OptimizerConfig.model_validate({"name": "lion", "lr": 1e-3, "eps": 1e-8})
    with pytest.raises(ValidationError, match="'adamw' needs eps"):
        OptimizerConfig.model_validate({"lr": 1e-3, "eps": None})


class _Stop(Hook):
    """Stops after about six steps."""

    def on_step(self, job: Job, result: StepResult) -> None:
        if job.state.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(rank: int, config: RunConfig, stops: bool) -> dict[str, Tensor]:
    job = build(config, hooks=[_Stop()] if stops else [])
    with contextlib.suppress(RetryableError):
        fit(job)
    assert (job.state.step < 12) == stops
    return {name: local(tensor).detach().clone() for name, tensor in job.tensors().items()}


@pytest.mark.slow
def test_lion_and_its_schedule_go_on_bit_for_bit(tmp_path: Path) -> None:
    states = []
    for name, parts in (("whole", [False]), ("stopped", [True, False])):
        tree = toy_run.config(
            tmp_path / name, duration="12step", schedule={"name": "inverse_sqrt", "warmup": "4step", "start_frac": 0.1}
        ).model_dump(mode="json")
        tree["train"]["optimizer"] = {"name": "lion", "lr": 1e-3}
        config = from_dict(RunConfig, tree, "toy").config
        states.append([run_ranks(2, _fit, config, stops) for stops in parts][-1])
        assert {"lr-Lion/group0"} == {key for row in read_metrics(config.run_folder) for key in row if key[:3] == "lr-"}
    for whole, stopped in zip(*states, strict=True):
        assert set(whole) == set(stopped)
        for name, tensor in whole.items():
            assert torch.equal(stopped[name], tensor), name
