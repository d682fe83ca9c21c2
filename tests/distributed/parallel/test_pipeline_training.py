"""A run whose layers are spread over ranks is the run of one process: losses, norms, checkpoints, held-out loss."""

from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
from conftest import PROVE
from gloo_ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint, saver
from smalti.evals.in_loop import heldout_hook
from smalti.train import build
from smalti.train.job import tensors_of
from smalti.train.step import train_step

ONE_ROW, THREE_ROWS = mesh_runs.SEQ_LEN, 3 * mesh_runs.SEQ_LEN
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")


def _in_turn(rank: int, runs: list[tuple[RunConfig, int, str | None]]) -> list[mesh_runs.Run]:
    """Several runs in one world of ranks; with a file of choices, these are forced."""
    return [mesh_runs._train(rank, config, steps, known, known is not None) for config, steps, known in runs]


def _farthest(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def _compare(root: Path, ranks: int, cases: list[tuple[str, dict[str, Any]]], steps: int, model: Any = None) -> None:
    """Each (kind, parallel) on ``ranks`` ranks against one process with microbatches of the same size."""

    def config(name: str, kind: str, ranks: int, **parallel: Any) -> RunConfig:
        made = mesh_runs.config_of(root, kind, name, steps, ranks, **parallel)
        return made if model is None else made.model_copy(update={"model": made.model.model_copy(update=model)})

    alone = {(kind, parallel["microbatch_tokens"]) for kind, parallel in cases}
    runs = [
        (config(f"one-{kind}-{tokens}", kind, 1, microbatch_tokens=tokens), steps, None)
        for kind, tokens in sorted(alone)
    ]
    references = dict(zip(sorted(alone), run_ranks(1, _in_turn, runs, timeout_s=300)[0], strict=True))
    for (kind, tokens), reference in references.items():
        torch.save(reference.choices, root / f"{kind}-{tokens}.pt")
    spread = list[Any]()
    for number, (kind, parallel) in enumerate(cases):
        known = str(root / f"{kind}-{parallel['microbatch_tokens']}.pt") if kind == "moe" else None
        spread.append((config(f"many-{number}", kind, ranks, **parallel), steps, known))
    results = run_ranks(ranks, _in_turn, spread, timeout_s=300)
    for number, (kind, parallel) in enumerate(cases):
        reference = references[kind, parallel["microbatch_tokens"]]
        curves = results[0][number]
        assert all(result[number].loss == curves.loss for result in results), "ranks disagree about the loss"
        assert _farthest(curves.loss, reference.loss) < 1e-5, (kind, parallel)
        assert _farthest(curves.grad_norm, reference.grad_norm) < 1e-5, (kind, parallel)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "schedules"),
    [("moe", ["interleaved"]), pytest.param("dense", ["1f1b", "zero_bubble"], marks=pytest.mark.slow)],
)
def test_two_ranks_train_as_one(kind: str, schedules: list[str], tmp_path: Path) -> None:
    """Packed documents; microbatches of three rows, of which the last is short; experts."""
    ragged = {"pipeline": 2, "microbatch_tokens": THREE_ROWS}
    _compare(tmp_path, 2, [(kind, {**ragged, "pipeline_schedule": schedule}) for schedule in schedules], 2)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("kind", ["dense", "moe"] if PROVE else ["moe"])
def test_four_ranks_train_as_one(kind: str, tmp_path: Path) -> None:
    cases = [
        (kind, {"pipeline": 2, "shard": 2, "pipeline_schedule": schedule, "microbatch_tokens": ONE_ROW})
        for schedule in SCHEDULES
    ]
    _compare(tmp_path, 4, [*cases, (kind, {"pipeline": 4, "microbatch_tokens": ONE_ROW})], 20 if PROVE else 4)


@pytest.mark.slow
def test_tied_embeddings_and_uneven_stages(tmp_path: Path) -> None:
    parallel = {"pipeline": 2, "pipeline_schedule": "zero_bubble", "microbatch_tokens": ONE_ROW}
    tied = {"tie_word_embeddings": True, "num_hidden_layers": 5}
    _compare(tmp_path, 2, [("dense", parallel)], 5, tied)


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def _saved(rank: int, config: RunConfig) -> tuple[str, dict[str, Tensor]]:
    job = build(config)
    for step in range(2):
        train_step(job.state, job.batches.batch(step), job.loss)
    path = saver.save(job.folder.checkpoints, 2, job.tensors(), {"step": 2}, keep=1)
    return path, _whole(job.tensors())


def _loaded(rank: int, config: RunConfig, path: str, init: RunConfig) -> list[dict[str, Tensor]]:
    job = build(config)
    checkpoint.load(path, tensors_of(job.state))
    begun = build(init).tensors()
    return [_whole(job.tensors()), _whole({n: t for n, t in begun.items() if n.startswith("model.")})]


def _together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in whole or torch.equal(whole[name], tensor), name
            whole[name] = tensor
    return whole


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_loads_at_any_other(tmp_path: Path) -> None:
    """Bit by bit, moments included; and as the begin of another run."""
    parallel = {"pipeline": 2, "microbatch_tokens": ONE_ROW}
    config = mesh_runs.config_of(tmp_path, "moe", "saved", 4, 2, **parallel)
    saved = run_ranks(2, _saved, config)
    path, wanted = saved[0][0], _together([tensors for _, tensors in saved])
    for ranks, other in ((1, {}), (2, {**parallel, "pipeline_schedule": "interleaved"})):
        loading = mesh_runs.config_of(tmp_path, "moe", f"loaded-{ranks}", 4, ranks, **other)
        begins = mesh_runs.config_of(tmp_path, "moe", f"begins-{ranks}", 4, ranks, **other)
        begins = begins.model_copy(update={"init_from": path})
        tensors_of_ranks = run_ranks(ranks, _loaded, loading, path, begins)
        for number, only in ((0, wanted), (1, {n: t for n, t in wanted.items() if n.startswith("model.")})):
            whole = _together([parts[number] for parts in tensors_of_ranks])
            assert whole.keys() == only.keys()
            assert all(torch.equal(whole[name], tensor) for name, tensor in only.items())


def _measured(rank: int, config: RunConfig) -> dict[str, float]:
    job = build(config, evaluation=heldout_hook)
    measure = job.evaluate
    assert measure is not None
    before = measure(job.state.model, 0)
    train_step(job.state, job.batches.batch(0), job.loss)
    return {
        f"{name}-{when}": value
        for when, metrics in enumerate((before, measure(job.state.model, 1)))
        for name, value in metrics.items()
    }


@pytest.mark.slow
def test_held_out_loss_is_that_of_one_process(tmp_path: Path) -> None:
    results = []
    for ranks, parallel in ((1, {}), (2, {"pipeline": 2})):
        config = mesh_runs.config_of(tmp_path, "moe", f"h{ranks}", 4, ranks, **parallel, microbatch_tokens=ONE_ROW)
        heldout = config.data.model_copy(update={"heldout": {"made": str(tmp_path / "tokens/made")}})
        results.append(run_ranks(ranks, _measured, config.model_copy(update={"data": heldout})))
    (reference,), many = results
    assert many[0] == many[1]
    for name, value in reference.items():
        assert many[0][name] == pytest.approx(value, rel=1e-6), name
