"""The moving average of weights: that of a float64 reference, on any mesh, resumed to the bit, exported."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from checkpoint_tensors import stored_tensors
from gloo_ranks import run_ranks

from smalti.base.errors import UserError
from smalti.config.durations import LengthConfig, RunLength
from smalti.config.ema import EmaConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.checkpoint import checkpoint_bytes
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.distributed.checkpoint.checkpoint import StoredModel
from smalti.evals.in_loop import heldout_hook
from smalti.model.decoder import Decoder
from smalti.track.sinks.jsonl import read_metrics
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.optim import build_optimizer
from smalti.train.step import StepResult
from smalti.train.weight_average import WeightAverage

EMA = EmaConfig(half_life="5step")
LENGTH = RunLength.of(LengthConfig(duration="100step", global_batch_tokens=10))
LAST = "checkpoints/step-00000012"


class Weights(Hook):
    """Keeps the weights after each step; ends the attempt after step ``until``."""

    def __init__(self, until: int) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self._until = until

    def on_step(self, job: Job, result: StepResult) -> None:
        parameters = job.state.model.named_parameters()
        self.after.append({name: value.detach().full_tensor().clone() for name, value in parameters})  # type: ignore[attr-defined]
        if job.state.step == self._until:
            os.kill(os.getpid(), signal.SIGTERM)


def _config(root: Path, kind: str = "dense", **train: Any) -> RunConfig:
    ema = EMA.model_dump(mode="json", exclude_none=True)
    return toy_run.config(root, kind, duration="12step", checkpoint={"every": "4step"}, ema=ema, **train)


def _fit(rank: int, config: RunConfig, until: int = 99) -> list[dict[str, torch.Tensor]]:
    hook = Weights(until)
    job = build(config, hooks=[hook])
    if until < 12:
        with pytest.raises(Exception, match="stopped"):
            fit(job)
    else:
        fit(job)
    return hook.after


def _averages(config: RunConfig) -> dict[str, torch.Tensor]:
    stored = stored_tensors(Path(config.run_folder) / LAST)
    return {
        name.removeprefix("optimizer.").removesuffix(".ema"): tensor
        for name, tensor in stored.items()
        if name.endswith(".ema")
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel"),
    [
        ("moe", 1, {}),
        ("dense", 2, {"tensor": 2}),
        *(pytest.param("moe", 2, axes, marks=pytest.mark.slow) for axes in ({}, {"expert": 2}, {"replicate": 2})),
    ],
)
def test_it_is_that_of_a_float64_reference(kind: str, ranks: int, parallel: dict[str, int], tmp_path: Path) -> None:
    config = _config(tmp_path, kind, parallel={"ranks": ranks, "threads": 1, **parallel})
    after = run_ranks(ranks, _fit, config)[0]
    averages = _averages(config)
    assert averages.keys() == after[0].keys()
    for name, average in averages.items():
        expected = torch.zeros_like(after[0][name], dtype=torch.float64)
        for step, weights in enumerate(after):
            decay = min(0.5 ** (1 / 5), step / (step + 1))
            expected = decay * expected + (1 - decay) * weights[name].double()
        error = (average.double() - expected).norm() / expected.norm()
        assert (average.dtype, average.shape) == (torch.float32, expected.shape)
        assert error < 1e-6, name


@pytest.mark.slow
def test_a_stopped_run_continues_it_to_the_bit(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run_ranks(1, _fit, config)
    whole = _averages(config)
    shutil.rmtree(config.run_folder)
    run_ranks(1, _fit, config, 6)
    run_ranks(1, _fit, config)
    continued = _averages(config)
    assert all(torch.equal(continued[name], average) for name, average in whole.items())


def _average(parameters: dict[str, torch.nn.Parameter]) -> WeightAverage:
    module = torch.nn.ParameterDict(parameters)
    optimizer = build_optimizer(module, OptimizerConfig(lr=1e-3))
    return WeightAverage(EMA, LENGTH, optimizer)


def test_shards_have_the_parts_of_the_whole_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(1001, 3))
    parts = [torch.nn.Parameter(torch.zeros(rows, 3)) for rows in (1, 17, 0, 983)]
    of_whole, of_parts = _average({"w": whole}), _average({str(n): part for n, part in enumerate(parts)})
    for step in range(20):
        with torch.no_grad():
            whole.copy_(torch.randn(1001, 3, generator=generator))
            for part, rows in zip(parts, whole.split([1, 17, 0, 983]), strict=True):
                part.copy_(rows)
        for average in (of_whole, of_parts):
            average.update(step, torch.zeros(()))
    assert torch.equal(torch.cat(of_parts._averages), of_whole._averages[0])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    average = _average({"w": weight})
    average.update(0, torch.zeros(()))
    assert torch.equal(average._averages[0], torch.ones(4)), "initial weights have no part"
    with torch.no_grad():
        weight.fill_(torch.nan)
    average.update(1, torch.ones(()))
    assert torch.equal(average._averages[0], torch.ones(4))


def test_half_lives_in_steps_tokens_and_fractions_agree() -> None:
    decays = {EmaConfig(half_life=text).decay_at(50, LENGTH) for text in ("10step", "100tok", "0.1run")}
    assert max(decays) - min(decays) < 1e-12
    assert max(decays) == pytest.approx(0.5**0.1)
    assert EmaConfig(decay=0.9).decay_at(3, LENGTH) == 3 / 4, "a plain mean at first"
    assert EmaConfig(decay=0.9).decay_at(50, LENGTH) == 0.9
    for given in ({}, {"decay": 0.9, "half_life": "5step"}, {"half_life": "0step"}):
        with pytest.raises(ValueError, match=r"exactly one|above 0"):
            EmaConfig(**given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_is_planned_and_read_by_name(tmp_path: Path) -> None:
    config = _config(tmp_path)
    without = config.model_copy(update={"train": config.train.model_copy(update={"ema": None})})
    run_ranks(1, _fit, config)
    path = Path(config.run_folder) / LAST
    weights = sum(tensor.nbytes for tensor in _averages(config).values())
    planned = [memory_per_rank(each, layout=Layout(), device="cpu").moments_bytes for each in (config, without)]
    assert planned[0] - planned[1] == weights
    assert checkpoint_bytes(config) - checkpoint_bytes(without) == weights
    stored = StoredModel(path, ema=True)
    assert all(torch.equal(stored[name], average) for name, average in _averages(config).items())
    shutil.rmtree(config.run_folder)
    run_ranks(1, _fit, without)
    with pytest.raises(UserError, match="has no moving average"):
        StoredModel(path, ema=True)


# ---- its held-out loss ----------------------------------------------------------------------------------------------


def _evaluated(rank: int, config: RunConfig) -> None:
    fit(build(config, evaluation=heldout_hook))


def _of_exported(rank: int, config: RunConfig, step: int) -> list[dict[str, float]]:
    """Held-out measures of the weights and of their average in the checkpoint of a step, each in a plain model."""
    evaluate = heldout_hook(config)
    assert evaluate is not None
    measures = []
    for ema in (False, True):
        model = Decoder(config.model)
        weights = StoredModel(Path(config.run_folder) / f"checkpoints/step-{step:08d}", ema=ema)
        model.load_state_dict(dict(weights))
        measures.append(evaluate(model, step))
    return measures


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("dense", {}),
        ("moe", {"expert": 2}),
        ("dense", {"tensor": 2}),
        ("dense", {"replicate": 2}),
        ("dense", {"pipeline": 2}),
    ],
)
def test_its_heldout_loss_is_that_of_the_exported_average_and_training_is_undisturbed(
    kind: str, parallel: dict[str, int], tmp_path: Path
) -> None:
    """Evaluated after each step and while checkpoints are saved; weights, moments and average are those of a run
    without evaluations, to the bit."""
    section = {"parallel": {"ranks": 2, "threads": 1, **parallel}, "eval_tokens": 2000}
    config = _config(tmp_path, kind, eval_every="1step", **section)
    quiet = _config(tmp_path, kind, **section).model_copy(update={"folder": str(tmp_path / "runs" / "quiet")})
    heldout = {"code": str(tmp_path / "tokens" / "code")}
    config = config.model_copy(update={"data": config.data.model_copy(update={"heldout": heldout})})
    run_ranks(2, _evaluated, config)
    run_ranks(2, _fit, quiet)
    with_evaluations, without = (stored_tensors(Path(each.run_folder) / LAST) for each in (config, quiet))
    assert with_evaluations.keys() == without.keys()
    assert all(torch.equal(with_evaluations[name], tensor) for name, tensor in without.items())
    rows = {
        row["step"]: row for row in read_metrics(Path(config.run_folder)) if "metrics/eval/code/bits_per_byte" in row
    }
    assert list(rows) == list(range(1, 13))
    train = config.train.model_copy(update={"parallel": _config(tmp_path, kind).train.parallel})
    [(of_weights, of_average)] = run_ranks(1, _of_exported, config.model_copy(update={"train": train}), 12)
    for name, value in of_weights.items():
        assert rows[12][name] == pytest.approx(value, rel=1e-6)
        average = of_average[name]
        assert rows[12][name.replace("metrics/eval/", "metrics/eval_ema/")] == pytest.approx(average, rel=1e-6)
        assert abs(average - value) > 1e-4, "they differ"
