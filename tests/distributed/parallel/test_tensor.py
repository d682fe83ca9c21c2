"""Tensor parallelism: steps, checkpoints and collectives of ranks that share each matrix, against one process."""

import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoint_tensors import stored_tensors
from conftest import PROVE
from gloo_ranks import run_ranks
from torch import Tensor

from smalti.base.errors import UserError
from smalti.config.load import load
from smalti.config.model import ModelConfig, MoEConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.run import RunConfig
from smalti.config.train import LossConfig, PrecisionConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import collectives
from smalti.distributed.checkpoint import checkpoint, saver
from smalti.distributed.group import mesh as meshes
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.distributed.trace.traffic import Traffic
from smalti.model.blocks.moe.choices import forced_choices, recorded_choices
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.track.checkpoints.names import folder_name
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.gradient_sums import with_gradient_sums
from smalti.train.job import tensors_of
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer
from smalti.train.step import TrainState, one_by_one, train_step

VOCAB, ROWS, TIME = 96, 4, 16
BASE: dict[str, Any] = {
    "family": "decoder", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MIXED = MoEConfig(
    num_experts=4, num_experts_per_tok=2, num_shared_experts=1, intermediate_size=24, mlp_only_layers=(0,),
    balance_loss_coef=0.01, z_loss_coef=0.001, global_balance_loss_coef=0.01, router_lr_frac=0.5,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"norm": "layernorm", "final_logit_softcapping": 5.0},
    "tied": {"tie_word_embeddings": True, "qk_norm": "full", "attention_bias": True, "mlp_bias": True},
    "alibi": {"position": "alibi", "qk_norm": "head", "clip_qkv": 0.3, "gated": False, "embedding_norm": True},
    "moe": {"moe": MIXED},
    "sigmoid": {"moe": MIXED.model_copy(update={"score": "sigmoid", "bias_update_rate": 0.01, "kernel": "loop"})},
}
LAYOUTS = {2: [Layout(tensor=2)], 4: [Layout(tensor=4), Layout(shard=2, tensor=2), Layout(replicate=2, tensor=2)]}


def _model(name: str) -> ModelConfig:
    return ModelConfig(**(BASE | MODELS[name]))


def _laid(config: ModelConfig, mesh: Mesh, *, recomputes: bool = False, compute: str = "fp32") -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    parallel = ParallelConfig(activation_checkpointing="full" if recomputes else "none")
    parallelize(model, mesh, parallel, PrecisionConfig.model_validate({"compute": compute}))
    fsdp.materialize(model, torch.device("cpu"), lambda name, shape: draw(name, shape, config, 1))
    return model


def _state(config: ModelConfig, mesh: Mesh, model: Decoder) -> tuple[TrainState, LanguageLoss]:
    loss = LanguageLoss(config, LossConfig(z_loss_coef=1e-3, chunk_bytes=2**14))
    optimizer = build_optimizer(model, OptimizerConfig(lr=3e-3))
    forward_backward = with_gradient_sums(one_by_one, mesh)
    state = TrainState(
        model, optimizer, lambda _: 3e-3, 1.0, loss.balance, forward_backward, tensor_parallel_size=mesh.layout.tensor
    )
    return state, loss


def _rows(step: int, mesh: Mesh, microbatches: int = 2) -> list[Microbatch]:
    """Packed rows, some targets of which do not count, as this rank reads them."""
    torch.manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, TIME + 1))
    documents = torch.arange(TIME).expand(ROWS, -1) // 5
    targets = tokens[:, 1:].masked_fill(documents == 1, IGNORE)
    whole = (tokens[:, :-1].contiguous(), targets, torch.arange(TIME).expand(ROWS, -1) % 5, documents.contiguous())
    mine = [_own(part, mesh).chunk(microbatches) for part in whole]
    return [Microbatch(*parts) for parts in zip(*mine, strict=True)]


def _own(rows: Tensor, mesh: Mesh) -> Tensor:
    return rows.chunk(mesh.layout.data_ranks)[mesh.data_rank]


class Curve(NamedTuple):
    """Metrics of each step."""

    figures: list[dict[str, Any]]
    choices: list[list[Any]]
    """[rows, T, k] of each layer; numpy, of which any number can be sent to another process."""


def _train(rank: int, layout: Layout, names: list[str], steps: int, known: dict[str, Curve] | None) -> dict[str, Curve]:
    mesh = meshes.build(torch.device("cpu"), layout)
    curves = {}
    for name in names:
        config = _model(name)
        state, loss = _state(config, mesh, _laid(config, mesh))
        curve = curves[name] = Curve([], [])
        for step in range(steps):
            with ExitStack() as routers:
                calls = None
                if known is None:
                    calls = routers.enter_context(recorded_choices(state.model))
                else:
                    forced = [_own(torch.from_numpy(choices), mesh).chunk(2) for choices in known[name].choices[step]]
                    order = [layer[number] for number in range(2) for layer in forced]
                    routers.enter_context(forced_choices(state.model, order))
                result = train_step(state, _rows(step, mesh), loss)
            figures = {"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics}
            curve.figures.append({key: value.numpy() for key, value in figures.items()})
            layers = len(calls or ()) // 2
            curve.choices.append([torch.cat(list((calls or [])[layer::layers])).numpy() for layer in range(layers)])
    return curves


def _on_all(
    rank: int, layouts: list[Layout], names: list[str], steps: int, known: dict[str, Curve]
) -> list[dict[str, Curve]]:
    return [_train(rank, layout, names, steps, known) for layout in layouts]


@pytest.mark.parametrize(
    ("ranks", "names", "steps"),
    [
        pytest.param(2, ["tied", "moe"], 3, marks=pytest.mark.slow),
        pytest.param(4, ["tied", "sigmoid"], 20, marks=pytest.mark.exhaustive),
        *([pytest.param(2, ["dense", "alibi"], 20, marks=pytest.mark.slow)] if PROVE else []),
    ],
)
def test_steps_are_those_of_one_process(ranks: int, names: list[str], steps: int) -> None:
    """Losses, their parts, gradient norms and loads of experts."""
    alone: dict[str, Curve] = run_ranks(1, _train, Layout(), names, steps, None)[0]
    of_ranks = run_ranks(ranks, _on_all, LAYOUTS[ranks], names, steps, alone)
    for layout, curves in zip(LAYOUTS[ranks], of_ranks[0], strict=True):
        for name, curve in curves.items():
            for step, (figures, wanted) in enumerate(zip(curve.figures, alone[name].figures, strict=True)):
                assert figures.keys() == wanted.keys()
                for key, value in wanted.items():
                    np.testing.assert_allclose(
                        figures[key], value, rtol=1e-5, atol=1e-7, err_msg=f"{layout} {name} step {step} {key}"
                    )
    for other in of_ranks[1:]:
        for mine, theirs in zip(of_ranks[0], other, strict=True):
            assert all(mine[name].figures[-1]["loss"] == theirs[name].figures[-1]["loss"] for name in mine)


# ---- parameters -----------------------------------------------------------------------------------------------------

UNEVEN = ModelConfig(
    family="decoder", vocab_size=98, hidden_size=30, head_dim=6, intermediate_size=54, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, qk_norm="full", attention_bias=True, mlp_bias=True,
    moe=MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=10, mlp_only_layers=(0,)),
)  # fmt: skip


def _whole(model: Decoder) -> dict[str, Tensor]:
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in whole.items()}


def _save(rank: int, folder: str, layout: Layout) -> dict[str, Tensor]:
    """Two steps, saved; the tensors as they were drawn, put together from their parts."""
    mesh = meshes.build(torch.device("cpu"), layout)
    model = _laid(UNEVEN, mesh)
    drawn = _whole(model)
    state, loss = _state(UNEVEN, mesh, model)
    for step in range(2):
        train_step(state, _rows(step, mesh), loss)
    saver.save(folder, 2, tensors_of(state), {}, keep=1)
    return drawn


def _load(rank: int, folder: str, layout: Layout) -> None:
    """Loaded in another layout and saved from there."""
    mesh = meshes.build(torch.device("cpu"), layout)
    state, _ = _state(UNEVEN, mesh, _laid(UNEVEN, mesh))
    checkpoint.load(f"{folder}/{folder_name(2)}", tensors_of(state))
    saver.save(f"{folder}-again", 2, tensors_of(state), {}, keep=1)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(tensor=2), Layout()),
        (Layout(shard=2, tensor=2), Layout()),
        (Layout(shard=2), Layout(shard=2, tensor=2)),
        (Layout(replicate=2, tensor=2), Layout(shard=2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_layout_is_loaded_by_another_to_the_bit(
    saved: Layout, loaded: Layout, tmp_path: Path
) -> None:
    """Sizes that neither the ranks of shard nor those of both divide, so that parts differ in size."""
    folder = str(tmp_path / "points")
    drawn = run_ranks(saved.world_size, _save, folder, saved)[0]
    for name, value in drawn.items():
        assert torch.equal(value, draw(name, value.shape, UNEVEN, 1)), name
    run_ranks(loaded.world_size, _load, folder, loaded)
    before, after = (stored_tensors(f"{path}/{folder_name(2)}") for path in (folder, f"{folder}-again"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    shutil.rmtree(folder)


# ---- collectives ----------------------------------------------------------------------------------------------------


def _run_config(model: ModelConfig, layout: Layout, recomputes: bool, compute: str) -> RunConfig:
    base = load(RunConfig, "demo", [f"data.seq_len={TIME}", f"train.global_batch_tokens={ROWS * TIME}"]).config
    again = "full" if recomputes else "none"
    parallel = base.train.parallel.model_copy(
        update={"ranks": layout.world_size, "tensor": layout.tensor, "activation_checkpointing": again}
    )
    precision = base.train.precision.model_copy(update={"compute": compute})
    loss = LossConfig(chunk_bytes=2**14)
    per_rank = ROWS * TIME // layout.data_ranks
    update = {"microbatch_tokens": per_rank // 2, "parallel": parallel, "precision": precision, "loss": loss}
    return base.model_copy(update={"model": model, "train": base.train.model_copy(update=update)})


Made = Counter[tuple[str, int]]


def _counted(rank: int, cases: list[tuple[RunConfig, Layout]]) -> list[Made]:
    counts = []
    for config, layout in cases:
        mesh = meshes.build(torch.device("cpu"), layout)
        recomputes = config.train.parallel.activation_checkpointing == "full"
        model = _laid(config.model, mesh, recomputes=recomputes, compute=config.train.precision.compute)
        state, _ = _state(config.model, mesh, model)
        loss = LanguageLoss(config.model, config.train.loss)
        # every token has a target: on a CPU the head skips others, of which the plan does not know
        rows = [batch._replace(targets=batch.inputs) for batch in _rows(0, mesh)]
        with Traffic(mesh) as traffic:
            train_step(state, rows, loss)
        made: Made = Counter()
        for call in traffic.calls:
            if call.axis == "tensor":
                made[call.op, call.bytes] += call.times
        counts.append(made)
    return counts


def _planned(config: RunConfig, layout: Layout) -> Made:
    made: Made = Counter()
    for collective in collectives(config, layout):
        if collective.axis == "tensor":
            made[collective.op, collective.bytes] += collective.count
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "of",
    [
        [("moe", Layout(tensor=2), False, "fp32")],
        pytest.param(
            [("dense", Layout(shard=2, tensor=2), False, "bf16"), ("tied", Layout(tensor=4), True, "fp32")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two", "four"],
)
def test_collectives_are_those_of_the_plan(of: list[tuple[str, Layout, bool, str]]) -> None:
    cases = [
        (_run_config(_model(name), layout, recomputes, compute), layout) for name, layout, recomputes, compute in of
    ]
    for made in run_ranks(cases[0][1].world_size, _counted, cases):
        for (config, layout), calls in zip(cases, made, strict=True):
            assert calls == _planned(config, layout)


# ---- refusals -------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_key_value_heads": 1}, ("tensor=2 is not possible: 1 key-value heads", "train.parallel.tensor=1")),
    ({"vocab_size": 97}, ("tensor=2 is not possible: 97 tokens of the vocabulary",)),
    ({}, ("rows of 15 tokens cannot be cut",)),
]


def _refused(rank: int) -> list[str]:
    mesh = meshes.build(torch.device("cpu"), Layout(tensor=2))
    messages = []
    for fields, _ in REFUSED:
        with pytest.raises(UserError) as caught:
            _laid(ModelConfig(**(BASE | fields)), mesh)(torch.zeros(1, 15, dtype=torch.int64))
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_cut_is_refused() -> None:
    for message, (_, parts) in zip(run_ranks(2, _refused)[0], REFUSED, strict=True):
        assert all(part in message for part in parts), message
