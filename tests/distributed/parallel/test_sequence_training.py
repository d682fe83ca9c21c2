"""Ranks that share rows train as one process does: losses, gradients, their norm, router sums, held-out loss."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mesh_runs
import numpy as np
import pytest
import sequence_runs
import torch
import torch.distributed as dist
from conftest import PROVE
from gloo_ranks import run_ranks
from tiny_models import llama_config, tiny_model, write_byte_tokens

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.layout.collectives import collectives
from smalti.distributed.group.mesh import build
from smalti.distributed.parallel import sequence
from smalti.evals.in_loop import heldout_hook
from smalti.model.decoder import Decoder
from smalti.train.rehearsal import rehearse

STEPS = 20
BF16 = 0.05
"""Gradients of one process in bf16 are up to 0.043 of the largest from those in fp32; those of a ring up to 0.032."""
FAST = ("everything in a score", "experts")


@cache
def _alone(names: tuple[str, ...], steps: int) -> dict[str, sequence_runs.Curves]:
    curves: dict[str, sequence_runs.Curves] = run_ranks(1, sequence_runs.train_all, names, "ulysses", 1, steps)[0]
    return curves


def _compare(names: tuple[str, ...], ranks: int, context: str, shard: int, steps: int = STEPS) -> None:
    alone = _alone(names, steps)
    for by_name in run_ranks(ranks, sequence_runs.train_all, names, context, shard, steps, alone):
        for name, curves in by_name.items():
            _close(curves, alone[name], 1e-5 if sequence_runs.CASES[name].compute == "fp32" else BF16)


def _close(curves: sequence_runs.Curves, alone: sequence_runs.Curves, rtol: float) -> None:
    np.testing.assert_allclose(curves.loss, alone.loss, rtol=rtol)
    np.testing.assert_allclose(curves.grad_norm, alone.grad_norm, rtol=rtol)
    assert curves.gradients.keys() == alone.gradients.keys()
    for key, gradient in alone.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(curves.gradients[key], gradient, rtol=0, atol=rtol * largest, msg=key)
    for key, value in alone.metrics.items():
        torch.testing.assert_close(curves.metrics[key], value, rtol=rtol, atol=1e-9, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_four_ranks_train_as_one(context: str) -> None:
    _compare(FAST, 4, context, 2, steps=3)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4] if PROVE else [2])
def test_all_kinds_train_as_one(ranks: int, context: str) -> None:
    _compare(tuple(sequence_runs.CASES), ranks, context, 1)


def _config(folder: str, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "r",
            "model": llama_config().model_dump(),
            "data": {
                "sources": {"code": folder}, "heldout": {"code": folder}, "seq_len": 16,
                "stages": [{"weights": {"code": 1}}],
            },
            "train": {
                "duration": "1step", "global_batch_tokens": 32, "optimizer": {"lr": 1e-3}, "eval_tokens": 16 * 5,
                "parallel": parallel,
            },
        }
    )  # fmt: skip


def _measured(rank: int, folder: str, contexts: list[Any]) -> list[dict[str, float]]:
    metrics = []
    for context in contexts:
        config = _config(folder, ranks=dist.get_world_size(), sequence=2, context=context)
        mesh = build(torch.device("cpu"), layout_of(config))
        model = tiny_model(llama_config())
        sequence.apply(model, mesh, context=context)
        hook = heldout_hook(config, mesh=mesh)
        assert hook is not None
        metrics.append(hook(model, 0))
    return metrics


def test_held_out_loss_is_that_of_one_process(tmp_path: Path) -> None:
    folder = write_byte_tokens(tmp_path / "tokens", ["a longer one " * 30, "é€😀 " * 20])
    alone = heldout_hook(_config(folder))
    assert alone is not None
    wanted = alone(tiny_model(llama_config()), 0)
    for of_rank in run_ranks(4, _measured, folder, ["ulysses", "ring"]):
        for metrics in of_rank:
            assert metrics == pytest.approx(wanted, rel=1e-6)


def test_held_out_loss_needs_the_mesh_where_ranks_read_the_same_rows(tmp_path: Path) -> None:
    folder = write_byte_tokens(tmp_path / "tokens", ["a longer one " * 30])
    with pytest.raises(UserError, match="axis sequence") as caught:
        heldout_hook(_config(folder, ranks=2, sequence=2))
    assert "evaluation=heldout_hook" in str(caught.value.hint)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_planned_messages_are_those_that_are_sent(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window in every second layer, experts, and a table by the longest position."""
    types = ("sliding_attention", "full_attention") * 2
    more = {"sliding_window": 9, "layer_types": types, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    more |= {"family": "decoder", "max_position_embeddings": mesh_runs.SEQ_LEN, "num_key_value_heads": 2}
    monkeypatch.setitem(mesh_runs.MODELS, "odd", mesh_runs.MOE | more)
    tokens = mesh_runs.SEQ_LEN
    axes = {"sequence": 4, "context": context, "microbatch_tokens": tokens}
    config = mesh_runs.config_of(tmp_path, "odd", context, 2, 4, **axes)
    sent = {(call.op, call.bytes): call.count for call in rehearse(config).collectives if call.axis == "sequence"}
    planned = Counter[tuple[str, int]]()
    for collective in collectives(config, layout_of(config), tokens, context=context):
        if collective.axis == "sequence":
            planned[collective.op, collective.bytes] += collective.count
    assert sent == planned


def _refused(rank: int) -> list[str]:
    mesh = build(torch.device("cpu"), Layout(sequence=4))
    errors = []
    for heads, kv_heads in ((6, 6), (12, 3)):
        fields = llama_config().model_dump() | {"hidden_size": 48, "num_attention_heads": heads}
        with torch.device("meta"):
            model = Decoder(ModelConfig(**fields | {"num_key_value_heads": kv_heads}))
        with pytest.raises(UserError) as caught:
            sequence.apply(model, mesh, context="ulysses")
        errors.append(f"{caught.value.message}; {caught.value.hint}")
        sequence.apply(model, mesh, context="ring")
    with pytest.raises(UserError) as caught:
        sequence.own_part(mesh, context="ring")(torch.zeros(1, 20))
    return [*errors, f"{caught.value.message}; {caught.value.hint}"]


def test_what_cannot_be_shared_is_refused_with_what_can() -> None:
    six, three, rows = run_ranks(4, _refused)[0]
    assert "6 query heads" in six
    assert "3 key-value heads" in three
    assert "context=ring" in six
    assert "20 tokens" in rows
    assert "seq_len=16" in rows or "seq_len=24" in rows
