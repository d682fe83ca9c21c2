"""``evals.mesh_scores``: any mesh scores windows as one process does."""

from pathlib import Path
from typing import Any

import mesh_runs
import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from tiny_models import llama_config, tiny_model

from smalti.config.run import RunConfig
from smalti.evals.likelihood import Scores, Window, score_greedy
from smalti.evals.mesh_scores import Shard, score, shard_of
from smalti.train import build


def _windows(vocab: int, longest: int, n: int = 23) -> list[Window]:
    draw = np.random.default_rng(5)
    rows = [draw.integers(1, vocab, size=draw.integers(2, longest + 1)) for _ in range(n)]
    return [Window(row, int(draw.integers(1, len(row)))) for row in rows]


def _assert_equal(found: Scores, wanted: Scores) -> None:
    assert found.nats == pytest.approx(wanted.nats, rel=1e-5)
    assert (found.n_tokens == wanted.n_tokens).all()
    assert (found.greedy == wanted.greedy).all()


@pytest.mark.parametrize(("batch_tokens", "multiple"), [(1, 1), (50, 4), (10_000, 16)])
def test_the_batches_change_nothing(batch_tokens: int, multiple: int) -> None:
    model, windows = tiny_model(llama_config()).eval(), _windows(90, 30)
    shard = Shard(0, 1, lambda rows: rows, multiple=multiple)
    _assert_equal(score(model, windows, shard, batch_tokens=batch_tokens), score_greedy(model, windows))


def _on_mesh(rank: int, config: RunConfig) -> Scores:
    job = build(config)
    windows = _windows(mesh_runs.VOCAB, mesh_runs.SEQ_LEN)
    shard = shard_of(config.train.parallel, job.mesh)
    with torch.no_grad():
        return score(job.state.model.eval(), windows, shard, batch_tokens=150)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (3, {}),
        (2, {"tensor": 2}),
        (2, {"sequence": 2}),
        (2, {"sequence": 2, "context": "ring"}),
        (2, {"pipeline": 2, "microbatch_tokens": mesh_runs.SEQ_LEN}),
        (2, {"expert": 2, "dispatch": "static"}),
    ],
)
def test_any_mesh_scores_as_one_process(tmp_path: Path, ranks: int, axes: dict[str, Any]) -> None:
    kind = "moe" if "expert" in axes else "dense"
    (alone,) = run_ranks(1, _on_mesh, mesh_runs.config_of(tmp_path, kind, "alone", 1))
    for found in run_ranks(ranks, _on_mesh, mesh_runs.config_of(tmp_path, kind, "many", 1, ranks, **axes)):
        _assert_equal(found, alone)
