"""Pipeline stages: which layers a rank has, and a router's loss that joins the gradients where it arises."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.parallel import PipelineSchedule
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.rules import why_not_pipeline
from smalti.cost.microbatch import check_pipeline, why_not_microbatches
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.pipeline import apply, stages_of
from smalti.model.blocks.attention.scores import document_runs
from smalti.model.decoder import Decoder
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.pipeline import _filled, _with_stage_loss

SCHEDULES = st.sampled_from(["1f1b", "interleaved", "zero_bubble"])


@given(st.integers(1, 40), st.integers(2, 8), SCHEDULES)
def test_each_layer_lies_on_one_stage_in_order_and_evenly(layers: int, ranks: int, schedule: PipelineSchedule) -> None:
    count = ranks if schedule == "1f1b" else 2 * ranks
    if layers < count:  # which the rule of the plan refuses before
        with pytest.raises(AssertionError):
            stages_of(layers, ranks, schedule)
        return
    stages = stages_of(layers, ranks, schedule)
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    held = [sum(stage.local_rank == rank for stage in stages) for rank in range(ranks)]
    assert held == [count // ranks] * ranks
    assert stages[0].local_rank == 0
    assert stages[0].is_first
    assert stages[-1].is_last
    assert stages[-1].local_rank == (0 if schedule == "zero_bubble" else ranks - 1)


@pytest.mark.parametrize(
    ("changes", "ranks", "why", "hint"),
    [
        ({"num_hidden_layers": 6}, 4, "6 layers are fewer than its 8 pipeline stages", 3),
        ({"tie_word_embeddings": True, "num_hidden_layers": 8}, 2, "zero_bubble keeps both on one rank", 1),
        ({"tie_word_embeddings": True, "num_hidden_layers": 8}, 4, "zero_bubble keeps both on one rank", 1),
    ],
)
def test_what_the_rule_of_the_plan_excludes_is_refused(
    changes: dict[str, Any], ranks: int, why: str, hint: int
) -> None:
    with torch.device("meta"):
        model = Decoder(_run().model.model_copy(update=changes))
    assert why_not_pipeline(model.config, ranks, "interleaved") is not None
    mesh = Mesh(Layout(pipeline=ranks), root=cast(Any, None))
    with pytest.raises(UserError, match=why) as failure:
        apply(model, mesh, schedule="interleaved", compute=torch.float32)
    assert failure.value.hint == f"train.parallel.pipeline={hint}"
    assert why_not_pipeline(model.config, hint, "interleaved") is None


def test_a_part_of_the_loss_gets_a_gradient_of_one() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    carried = _with_stage_loss(x * 2, weight * 3)
    torch.testing.assert_close(carried, x * 2)
    torch.autograd.backward(carried, torch.full((3,), 5.0))
    assert weight.grad is not None
    assert x.grad is not None
    assert float(weight.grad) == 3.0
    assert x.grad.tolist() == [10.0] * 3
    assert _with_stage_loss(x, torch.tensor(1.0)) is x


def test_rows_that_fill_up_have_no_target() -> None:
    ids = torch.arange(6).reshape(2, 3)
    filled = _filled(Microbatch(ids, ids + 1, ids, ids), 4)
    assert [part.shape for part in filled if isinstance(part, torch.Tensor)] == [(4, 3)] * 4
    assert torch.equal(filled.inputs[:2], ids)
    assert (filled.targets[2:] == IGNORE).all()
    assert _filled(Microbatch(ids, ids, ids, None), 4).documents is None


@pytest.mark.parametrize("n_documents", [None, 5])
def test_rows_that_fill_up_are_a_document_each(n_documents: int | None) -> None:
    documents = torch.tensor([[0, 0, 1], [0, 1, 2]])
    filled = _filled(Microbatch(documents, documents, documents, documents, n_documents), 4)
    assert filled.documents is not None
    assert int(document_runs(filled.documents).sum()) == 7
    assert filled.n_documents == (None if n_documents is None else 7)


def test_numbers_of_microbatches() -> None:
    assert why_not_microbatches(4, 4, "1f1b") is None
    assert "fewer than" in str(why_not_microbatches(3, 4, "zero_bubble"))
    assert why_not_microbatches(7, 4, "interleaved") is None, "one round of 7"
    assert "rounds" in str(why_not_microbatches(9, 4, "interleaved"))


def _run(**train: Any) -> RunConfig:
    """Steps of 8 rows of 64 tokens."""
    tree = {
        "name": "p", "model": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
                               "num_attention_heads": 4, "num_key_value_heads": 4},
        "data": {"sources": {"a": "a"}, "seq_len": 64, "stages": [{"weights": {"a": 1}}]},
        "train": {"duration": "4step", "global_batch_tokens": 512, "optimizer": {"lr": 1e-3}, **train},
    }  # fmt: skip
    return from_dict(RunConfig, tree, "p").config


def test_too_large_microbatches_are_refused_with_the_nearest() -> None:
    layout = Layout(pipeline=2)
    check_pipeline(_run(), layout, 128)
    check_pipeline(_run(), Layout(), 512)
    with pytest.raises(UserError, match="1 microbatch: fewer") as failure:
        check_pipeline(_run(), layout, 512)
    assert failure.value.hint == "train.microbatch_tokens=256"
    with pytest.raises(UserError) as failure:
        check_pipeline(_run(), Layout(pipeline=16), 64)
    assert "train.parallel.pipeline=8" in str(failure.value.hint)
    twice = _run(
        parallel={"pipeline_schedule": "zero_bubble", "activation_checkpointing": "full", "ranks": 2, "pipeline": 2}
    )
    with pytest.raises(UserError, match="recompute the blocks"):
        check_pipeline(twice, layout, 64)
