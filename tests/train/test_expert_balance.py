"""Load balancing of experts: losses against formulas, exactness under any split, bias updates, resume."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_run
from gloo_ranks import run_ranks

from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.run import RunConfig
from smalti.config.train import LossConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import mesh as meshes
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.dtensors import local
from smalti.model.blocks.moe.router import Router
from smalti.model.blocks.moe.router_stats import RouterStats, over_layers, router_stats
from smalti.model.decoder import Decoder
from smalti.model.init import draw, init_weights
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.expert_balance import ExpertBalance
from smalti.train.hooks import Hook
from smalti.train.job import build, tensors_of
from smalti.train.loop import fit
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer
from smalti.train.step import TrainState, train_step

EXPERTS, TOP_K = 6, 2


def _config(**moe: Any) -> ModelConfig:
    moe = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "mlp_only_layers": [1]} | moe
    return ModelConfig(
        family="decoder", vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, initializer_range=0.2, moe=moe,
    )  # fmt: skip


def _rows(rows: int = 8, time: int = 12, seed: int = 0) -> Microbatch:
    random = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, 64, (2, rows, time), generator=random)
    for row in range(rows):
        targets[row, : row % 4] = IGNORE
    positions = torch.arange(time).expand(rows, time).contiguous()
    return Microbatch(inputs, targets, positions, torch.zeros_like(positions))


def _routed(logits: torch.Tensor, score: str, chosen: list[list[int]], valid: list[bool]) -> dict[str, Any]:
    """One sequence, one layer, expert by expert in plain Python with autograd."""
    scores = [row.softmax(-1) if score == "softmax" else row.sigmoid() for row in logits]
    kept = [token for token, counts in enumerate(valid) if counts]
    share = [scores[token] / scores[token].sum() for token in kept]
    load = [sum(expert in chosen[token] for token in kept) for expert in range(EXPERTS)]
    probability = [sum(one[expert] for one in share) for expert in range(EXPERTS)]
    per_sequence = sum(
        EXPERTS * (load[e] / (len(kept) * TOP_K)) * (probability[e] / len(kept)) * len(kept) for e in range(EXPERTS)
    )
    z = sum(logits[token].exp().sum().log() ** 2 for token in kept)
    entropy = sum(-float((one * one.log()).sum().detach()) for one in share) / float(torch.tensor(EXPERTS).log())
    return {"load": load, "probability": probability, "balance": per_sequence, "z": z, "entropy": entropy}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_equal_formulas_by_hand_and_their_gradients_those_of_autograd(score):
    config = _config(
        score=score, balance_loss_coef=0.3, global_balance_loss_coef=0.7, z_loss_coef=0.05, mlp_only_layers=[]
    ).model_copy(update={"num_hidden_layers": 1})
    router = Router(config).double()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    routing = router(x)
    stats = over_layers([router_stats(routing, mask)])
    balance = ExpertBalance(config)
    before = torch.tensor([[5.0, 0.0, 7.0, 1.0, 2.0, 5.0]])
    balance.after_step(router, {"moe/load": before}, skip=torch.tensor(False))
    total, log = balance.loss(stats)

    weight = router.weight.detach().clone().requires_grad_()
    rows = [
        _routed(x[row].double() @ weight.T, score, routing.expert_BTk[row].tolist(), mask[row].tolist())
        for row in range(2)
    ]
    in_all = [sum(row["probability"][e] for row in rows) for e in range(EXPERTS)]
    across = EXPERTS * sum(before[0, e] / before.sum() * in_all[e] for e in range(EXPERTS))
    wanted = {
        "loss/train/balance": sum(row["balance"] for row in rows),
        "loss/train/global_balance": across,
        "loss/train/router_z": sum(row["z"] for row in rows),
    }
    for name, value in wanted.items():
        assert float(log[name]) == pytest.approx(float(value.detach()), rel=1e-5)
    by_hand = 0.3 * wanted["loss/train/balance"] + 0.7 * across + 0.05 * wanted["loss/train/router_z"]
    assert float(total.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)
    assert float(log["moe/router_entropy"]) == pytest.approx(sum(row["entropy"] for row in rows), rel=1e-5)
    assert log["moe/load"].tolist() == [[sum(row["load"][e] for row in rows) for e in range(EXPERTS)]]
    (ours,) = torch.autograd.grad(total, router.weight)
    (reference,) = torch.autograd.grad(by_hand, weight)
    assert float((ours - reference).norm() / reference.norm()) < 1e-5


def test_before_the_first_step_the_global_loss_has_no_gradient():
    config = _config(balance_loss_coef=0, z_loss_coef=0, global_balance_loss_coef=1)
    model = Decoder(config)
    init_weights(model, config, 1)
    total, _ = ExpertBalance(config).loss(model(_rows().inputs).router)
    assert float(total.detach()) == pytest.approx(8 * 12, rel=1e-5)
    gradient = torch.autograd.grad(total, model.blocks[0].mlp.router.weight)[0]
    assert float(gradient.abs().max()) < 1e-4


def test_without_any_coefficient_there_is_no_loss():
    config = _config(balance_loss_coef=0, z_loss_coef=0)
    zero = torch.zeros(2, EXPERTS)
    total, log = ExpertBalance(config).loss(RouterStats(torch.ones(()), torch.ones(()), zero, zero, torch.zeros(2)))
    assert float(total) == 0
    assert "loss/train/global_balance" not in log


ALL = {"global_balance_loss_coef": 0.5, "bias_update_rate": 0.01, "score": "sigmoid", "num_shared_experts": 1}


def _three_steps(rank: int, microbatches: int) -> dict[str, torch.Tensor]:
    config, world_size, device = _config(**ALL), dist.get_world_size(), torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(config)
    fsdp.shard(model, meshes.build(device), compute="fp32", reduce="fp32")
    fsdp.materialize(model, device, lambda name, shape: draw(name, shape, config, 1))
    loss = LanguageLoss(config, LossConfig())
    state = TrainState(
        model, build_optimizer(model, OptimizerConfig(lr=1e-3)), lambda step: 1e-3, clip_norm=0.5, loss_state=loss.state
    )
    for step in range(3):
        parts = [tensor.chunk(world_size)[rank].chunk(microbatches) for tensor in _rows(seed=step)[:4]]
        result = train_step(state, [Microbatch(*part) for part in zip(*parts, strict=True)], loss)
    gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert loss.balance is not None
    return gradients | buffers | {"load": loss.balance.load_LE.clone(), "loss": result.loss}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "microbatches"), [(1, 4), (2, 1), (2, 4), (4, 2)])
def test_any_cut_into_microbatches_and_ranks_gives_the_same_losses_biases_and_gradients(world_size, microbatches):
    (whole,) = run_ranks(1, _three_steps, 1)
    for results in run_ranks(world_size, _three_steps, microbatches):
        for name, value in whole.items():
            if "choice_bias" in name or name == "load":
                assert torch.equal(results[name], value)
            else:
                assert float((results[name] - value).norm() / value.norm().clamp(min=1e-12)) < 2e-5, name


def test_biases_even_out_what_a_skewed_router_prefers():
    config = _config(bias_update_rate=0.005, num_experts=8, mlp_only_layers=[1, 2])
    random = torch.Generator().manual_seed(0)
    router, balance = Router(config), ExpertBalance(config)
    x = torch.randn(4, 256, 32, generator=random)
    with torch.no_grad():
        router.weight[0] += x.mean((0, 1)) * 5
        x += 0.7 * router.weight[0] / router.weight[0].norm()  # most tokens like expert 0 best
    loads = []
    for _ in range(300):
        routing = router(x)
        load = torch.zeros(8).scatter_add_(0, routing.expert_BTk.flatten(), torch.ones(4 * 256 * 2))
        loads.append(load)
        balance.after_step(router, {"moe/load": load[None]}, skip=torch.tensor(False))
    imbalance = [float(load.max() / load.mean()) for load in loads]
    assert imbalance[0] > 1.5
    assert max(imbalance[-20:]) < 1.2
    assert router.choice_bias[0] < 0
    steps = router.choice_bias / 0.005
    assert torch.allclose(steps, steps.round(), atol=1e-3)


def test_the_bias_chooses_and_does_not_weigh():
    config = _config(bias_update_rate=0.1)
    router = Router(config)
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        router.choice_bias[3] = 100.0
    routing = router(x)
    assert (routing.expert_BTk[..., 0] == 3).all()
    chosen = routing.score_BTE.gather(-1, routing.expert_BTk)
    assert torch.allclose(routing.weight_BTk, chosen / chosen.sum(-1, keepdim=True))
    assert "choice_bias" not in dict(router.named_parameters())
    assert "choice_bias" in router.state_dict()
    assert Router(_config()).choice_bias is None


def _run(root: Any, name: str, **changes: Any) -> RunConfig:
    tree = toy_run.config(root, "moe").model_dump(mode="json", exclude_unset=True)
    tree["model"] |= {"family": "decoder", "num_hidden_layers": 2}
    tree["model"]["moe"] |= {"global_balance_loss_coef": 0.3, "bias_update_rate": 0.01}
    tree |= {"name": name, "folder": str(root / "runs" / name), **changes}
    return from_dict(RunConfig, tree, "toy").config


def _trained(rank: int, root: Any, name: str, stop: int | None) -> dict[str, torch.Tensor]:
    class Stop(Exception):
        pass

    class StopAt(Hook):
        def on_checkpoint(self, job: Any, path: str) -> None:
            if stop is not None and job.state.step >= stop:
                raise Stop

    job = build(_run(root, name), hooks=[StopAt()])
    with contextlib.suppress(Stop):
        fit(job)
    return {key: local(value).clone() for key, value in tensors_of(job.state).items()}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_with_biases_and_the_load_of_the_step_before(tmp_path):
    (straight,) = run_ranks(1, _trained, tmp_path, "straight", None)
    (stopped,) = run_ranks(1, _trained, tmp_path, "resumed", 10)
    (resumed,) = run_ranks(1, _trained, tmp_path, "resumed", None)
    biases = [name for name in straight if name.endswith("choice_bias")]
    assert len(biases) == 2
    assert all(straight[name].abs().max() > 0 for name in biases)
    assert not torch.equal(stopped["balance.load"], straight["balance.load"])
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    saved = checkpoint.newest(tmp_path / "runs" / "resumed" / "checkpoints")
    assert {name for name in checkpoint.read_model(saved) if "choice_bias" in name} == {n[6:] for n in biases}


def _built_in_python(rank: int, root: Any) -> list[float]:
    """The largest bias of each layer after three steps with a loss that was given."""
    config = _run(root, "python", train={**toy_run.config(root).model_dump(mode="json")["train"], "duration": "3step"})
    job = build(config, loss=LanguageLoss(config.model, config.train.loss))
    fit(job)
    return [float(buffer.abs().max()) for name, buffer in job.state.model.named_buffers() if "choice_bias" in name]


@pytest.mark.slow
def test_a_loss_that_is_given_has_its_balance_too(tmp_path):
    (largest,) = run_ranks(1, _built_in_python, tmp_path)
    assert min(largest) > 0.009
