"""A run has the same tokens in the same order on any number of ranks, and losses that are equal up to rounding.

Kills, resumes and forks: ``tests/data/stream/test_killed_and_resumed_proof.py``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_run
from gloo_ranks import run_ranks

from smalti.data.stream.stream import Stream
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult


class Losses(Hook):
    """Keeps each step's loss, and how many tokens each expert of each layer took."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.load: list[Any] = []
        self.seen: list[Any] = []

    def on_step(self, job: Job, result: StepResult) -> None:
        self.loss.append(float(result.loss))
        if "moe/load" in result.metrics:
            self.load.append((result.metrics["moe/load"] * result.weight).round().long().tolist())


def _train(rank: int, config: Any) -> dict[str, Any]:
    losses = Losses()
    job = build(config, hooks=[losses])
    rows = [
        [(batch.inputs.tolist(), batch.targets.tolist()) for batch in job.batches.batch(step)] for step in range(24)
    ]
    fit(job)
    return {"loss": losses.loss, "load": losses.load, "rows": rows}


def _tokens_in_order(results: list[dict[str, Any]]) -> list[Any]:
    """The global batches put together again from what the ranks saw, empty microbatches left out."""
    order = []
    for step in range(24):
        for result in results:
            for inputs, targets in result["rows"][step]:
                order += [row for row, target in zip(inputs, targets, strict=True) if any(t != -100 for t in target)]
    return order


WORLDS = ((1, "auto"), (2, 64), (3, 96), (4, "auto"))
"""Ranks and ``microbatch_tokens`` of each run; the first is the reference."""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "worlds"), [("moe", WORLDS[::2]), ("dense", WORLDS), ("moe", WORLDS)])
def test_other_numbers_of_ranks_learn_the_same(kind: str, worlds: tuple[tuple[int, Any], ...], tmp_path: Path) -> None:
    reference: list[float] = []
    for world_size, microbatch_tokens in worlds:
        root = tmp_path / str(world_size)
        config = toy_run.config(root, kind, microbatch_tokens=microbatch_tokens)
        results = run_ranks(world_size, _train, config)
        if not reference:
            reference, loads, tokens = results[0]["loss"], results[0]["load"], _tokens_in_order(results)
            stream = Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=32)
            order_hash = stream.order_hash(0, 24)
            continue
        assert _tokens_in_order(results) == tokens
        other = Stream(
            config.data, seed=config.seed, length=config.length, microbatch_tokens=160,
            rank=world_size - 1, world_size=world_size,
        )  # fmt: skip
        assert other.order_hash(0, 24) == order_hash
        first = next((s for s, (a, b) in enumerate(zip(loads, results[0]["load"], strict=True)) if a != b), 24)
        if kind == "moe":
            print(f"{world_size} ranks: first step with another router choice: {first if first < 24 else 'none'}")
        np.testing.assert_allclose(results[0]["loss"][: first + 1], reference[: first + 1], rtol=1e-5)
        np.testing.assert_allclose(results[0]["loss"], reference, rtol=1e-5 if kind == "dense" else 1e-3)
