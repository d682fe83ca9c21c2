"""A step whose loss or gradient norm is not finite changes no bit of what a checkpoint holds, nor do those after it.

The run ends there, says which number it was, and leaves a checkpoint of the step before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from torch import Tensor, nn

from smalti.config.load import from_dict
from smalti.config.optimizer import OptimizerConfig
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.parallel.dtensors import local
from smalti.track.checkpoints.names import step_of
from smalti.track.run import RunFolder
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.optim import build_optimizer, moments
from smalti.train.recorder import NotFinite
from smalti.train.step import StepResult, TrainState, train_step

ADAMW, LION = {"lr": 3e-3}, {"name": "lion", "lr": 1e-3}
BOUND = {"lr": 3e-3, "clip_norm": 1e30}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """To the bit, the sign of zeros too."""
    return all(torch.equal(_bits(value), _bits(other[name])) for name, value in one.items())


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(torch.uint8 if value.dim() else value.dtype)


# ---- the optimizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ADAMW, LION], ids=["adamw", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_skips_where_found_inf_is_1(config: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.LayerNorm(7)).to(dtype)
    optimizer = build_optimizer(model, OptimizerConfig.model_validate({"weight_decay": 0.1, **config, "lr": 0.1}))

    def step(value: float, found_inf: float | None) -> dict[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf)
        optimizer.step()
        return {name: value.clone() for name, value in [*model.named_parameters(), *moments(model, optimizer).items()]}

    with torch.no_grad():
        model[0].weight[0, 0] = -0.0
    before = step(0.5, 0.0)
    assert _same(before, step(float("nan"), 1.0))
    assert _same(before, step(0.5, 1.0))
    changed = step(0.5, 0.0)
    assert not any(torch.equal(before[name], changed[name]) for name in before)


# ---- the step, on every kind of mesh ---------------------------------------------------------------------------------


def _config(root: Path, kind: str, optimizer: dict[str, Any], **parallel: Any) -> RunConfig:
    """Microbatches of two rows, so that gradients add up over several."""
    tree = toy_run.config(root, kind, microbatch_tokens=64).model_dump(mode="json")
    tree["train"]["optimizer"] = optimizer
    tree["train"]["parallel"] |= parallel
    if kind == "moe":
        tree["model"]["family"] = "decoder"
        tree["model"]["moe"] |= {"bias_update_rate": 0.01, "global_balance_loss_coef": 0.01}
    return from_dict(RunConfig, tree, "toy").config


def _spoil(job: Job, what: str) -> None:
    """The last rank's next step has a loss or a gradient that is not finite; on other ranks all values are finite."""
    forward_backward = job.state.forward_backward
    last = job.mesh.layout.world_size - 1

    def spoilt(state: TrainState, microbatches: Sequence[Any], loss: Any) -> Any:
        state.forward_backward = forward_backward
        sums = forward_backward(state, microbatches, loss)
        if torch.distributed.get_rank() == last and what == "loss":
            sums[-1]["total"] = sums[-1]["total"] * float("nan")
        if torch.distributed.get_rank() == last and what == "gradient norm":
            gradient = next(p.grad for p in reversed(list(state.model.parameters())) if local(p.grad).numel())
            local(gradient).flatten()[0] = float("inf")
        return sums

    job.state.forward_backward = spoilt


def _held(job: Job) -> dict[str, Tensor]:
    results = {name: local(tensor).detach().clone() for name, tensor in job.tensors().items()}
    return {name: tensor for name, tensor in results.items() if tensor.numel()}


def _unchanged(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, value in one.items() if torch.equal(value, other[name])]


def _around_a_bad_step(rank: int, config: RunConfig, what: str) -> dict[str, bool]:
    job, results = build(config), {}
    step = iter(range(9))

    def one() -> StepResult:
        return train_step(job.state, job.batches.batch(next(step)), job.loss)

    one()
    before = _held(job)
    one()
    good = _held(job)
    results["a good step changes all"] = _unchanged(before, good) == []
    _spoil(job, what)
    result = one()
    results["the result says so"] = not bool((result.loss + result.grad_norm).isfinite())
    results["the step changes nothing"] = _same(good, _held(job))
    one()
    results["nor does the next"] = _same(good, _held(job))
    job.state.found_inf = None
    one()
    results["anew it continues"] = _unchanged(good, _held(job)) == []
    return results


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("ranks", "kind", "optimizer", "parallel", "what"),
    [
        (1, "moe", ADAMW, {}, "gradient norm"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (1, "dense", LION, {}, "loss"),
                (2, "dense", BOUND, {}, "gradient norm"),
                (2, "moe", LION, {"replicate": 2}, "gradient norm"),
                (2, "dense", LION, {"tensor": 2}, "gradient norm"),
                (2, "moe", ADAMW, {"tensor": 2}, "loss"),
                (2, "moe", ADAMW, {"expert": 2}, "gradient norm"),
                (2, "moe", LION, {"expert": 2, "dispatch": "static"}, "loss"),
                (2, "moe", ADAMW, {"pipeline": 2}, "gradient norm"),
                (2, "dense", LION, {"pipeline": 2}, "loss"),
                (2, "dense", ADAMW, {"sequence": 2}, "loss"),
            ]
        ),
    ],
)
def test_a_step_that_is_not_finite_keeps_every_bit(
    ranks: int, kind: str, optimizer: dict[str, Any], parallel: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """The slow ones: each way to spread a model over ranks, each optimizer, clipping with and without effect."""
    for results in run_ranks(ranks, _around_a_bad_step, _config(tmp_path, kind, optimizer, **parallel), what):
        assert all(results.values()), results


# ---- the run --------------------------------------------------------------------------------------------------------


class _Spoils(Hook):
    """Spoils update number ``step``, and stores the state after the previous one."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_step(self, job: Job, result: StepResult) -> None:
        if job.state.step == self.step - 1:
            self.good = _held(job)
            _spoil(job, self.what)


def _ends(rank: int, config: RunConfig, what: str) -> tuple[str, int, bool, bool]:
    spoils = _Spoils(7, what)
    job = build(config, hooks=[spoils])
    with pytest.raises(NotFinite) as raised:
        fit(job)
    in_memory = job.state.step == 6 and _same(spoils.good, _held(job))
    job.folder.close()
    again = build(config)  # from the checkpoint
    return raised.value.message, int(raised.value.exit_code), in_memory, _same(spoils.good, _held(again))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_the_run_ends_with_the_cause_and_a_checkpoint_of_the_step_before(what: str, tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, log_every="4step")  # the step after it is done before anybody looks
    for message, code, in_memory, in_checkpoint in run_ranks(2, _ends, config, what):
        assert message.startswith(f"the {what} is {'nan' if what == 'loss' else 'inf'} at step 7; ")
        assert code == 3
        assert in_memory
        assert in_checkpoint
    folder = RunFolder.read(config.run_folder)
    event = next(event for event in folder.events() if event["event"] == "not_finite")
    assert (event["step"], event["cause"], event["value"]) == (7, what, "nan" if what == "loss" else "inf")
    newest = checkpoint.newest(folder.checkpoints)
    assert newest is not None
    assert step_of(newest) == 6
    assert [row["step"] for row in folder.metrics() if "loss/train/total" in row] == [1, 2, 3, 4, 5, 6]
