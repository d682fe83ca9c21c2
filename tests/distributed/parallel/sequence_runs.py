"""Training over ranks that share rows, against one process: a few steps on synthetic packed rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config.model import ModelConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.train import LossConfig, PrecisionConfig
from smalti.cost.axes import Layout
from smalti.distributed.group.mesh import Mesh, build
from smalti.distributed.parallel import fsdp, sequence
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.blocks.moe.choices import forced_choices, recorded_choices
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.step import TrainState, train_step

ROWS, TOKENS, VOCAB = 4, 32, 64
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "balance_loss_coef": 0.1, "z_loss_coef": 0.01}


class Case(NamedTuple):
    """A model and how it is trained."""

    model: dict[str, Any]
    packed: bool = True
    recompute: bool = False
    compute: str = "fp32"


CASES = {
    "grouped queries": Case({"num_key_value_heads": 2}),
    "everything in a score": Case(
        {
            "position": "alibi",
            "num_key_value_heads": 1,
            "attn_logit_softcapping": 2.0,
            "sliding_window": 9,
            "layer_types": ("sliding_attention", "full_attention"),
        },
        recompute=True,
    ),
    "experts": Case({"num_key_value_heads": 2, "moe": MOE}),
    "experts, bf16": Case({"num_key_value_heads": 2, "moe": MOE}, compute="bf16"),
    "rope by length": Case(
        {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, packed=False
    ),
}


class Curves(NamedTuple):
    """Results of a training run."""

    loss: list[float]
    grad_norm: list[float]
    gradients: dict[str, Tensor]
    """Whole gradients of the first step."""
    metrics: dict[str, Tensor]
    """Metrics of the first step."""
    choices: list[list[Tensor]]
    """Choices of the routers in each step."""


def config_of(case: Case) -> ModelConfig:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    more = {"family": "decoder", "num_attention_heads": 4, "initializer_range": 0.2}
    return ModelConfig.model_validate(shape | more | case.model)


def rows_of(step: int, *, packed: bool, rows: int = ROWS, tokens: int = TOKENS, document_tokens: int = 8) -> Microbatch:
    """The whole batch of a step: documents of about so many tokens, every tenth target ignored."""
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (rows, tokens + 1), generator=drawn)
    targets = ids[:, 1:].masked_fill(torch.rand(rows, tokens, generator=drawn) < 0.1, IGNORE)
    along = torch.arange(tokens).expand(rows, -1)
    if not packed:
        return Microbatch(ids[:, :-1], targets, along.contiguous(), None)
    begins = torch.rand(rows, tokens, generator=drawn) < 1 / document_tokens
    started = torch.where(begins, along, 0).cummax(dim=1).values
    return Microbatch(ids[:, :-1], targets, along - started, begins.cumsum(dim=1))


def shared(whole: Microbatch, mesh: Mesh, context: Any) -> Microbatch:
    """This rank's rows and tokens of them."""
    part_of_rank = sequence.own_part(mesh, context=context)

    def rows_of_rank(part: Tensor) -> Tensor:
        return part.chunk(mesh.layout.data_ranks)[mesh.data_rank]

    parts = (part_of_rank(rows_of_rank(part)) for part in (whole.inputs, whole.targets, whole.positions))
    return Microbatch(*parts, None if whole.documents is None else rows_of_rank(whole.documents))


def model_of(case: Case, mesh: Mesh, context: Any) -> nn.Module:
    config = config_of(case)
    with torch.device("meta"):
        model = Decoder(config)
    parallel = ParallelConfig(
        sequence="auto", context=context, activation_checkpointing="full" if case.recompute else "none"
    )
    parallelize(model, mesh, parallel, PrecisionConfig.model_validate({"compute": case.compute}))
    fsdp.materialize(model, torch.device("cpu"), lambda name, shape: draw(name, shape, config, 5))
    return model


def train_all(
    rank: int, names: Sequence[str], context: Any, shard: int, steps: int, alone: "dict[str, Curves] | None" = None
) -> dict[str, Curves]:
    """Several cases one after the other; the router choices of ``alone`` are forced."""
    return {
        name: train(rank, name, context, shard, steps, alone[name].choices if alone and _routes(name) else None)
        for name in names
    }


def _routes(name: str) -> bool:
    return "moe" in CASES[name].model


def train(
    rank: int, name: str, context: Any, shard: int, steps: int, choices: Sequence[list[Tensor]] | None = None
) -> Curves:
    """Rank's part of ``steps`` steps; ``choices``: of the routers of one process, forced."""
    case = CASES[name]
    mesh = build(torch.device("cpu"), Layout(shard=shard, sequence=dist.get_world_size() // shard))
    model, loss = model_of(case, mesh, context), LanguageLoss(config_of(case), LossConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    state = TrainState(model, optimizer, lambda _: 3e-3, 1.0, loss.balance)
    curves = Curves([], [], {}, {}, [])
    for step in range(steps):
        wanted = None if choices is None else [_own(choice, mesh, context) for choice in choices[step]]
        with _routed(model, wanted, keep=_routes(name) and choices is None) as taken:
            result = train_step(state, [shared(rows_of(step, packed=case.packed), mesh, context)], loss)
        curves.loss.append(float(result.loss))
        curves.grad_norm.append(float(result.grad_norm))
        curves.choices.append(taken)
        if step == 0:
            curves.metrics.update({key: value.clone() for key, value in result.metrics.items()})
            curves.gradients.update({key: _full(grad) for key, grad in _gradients(model).items() if grad is not None})
    return curves


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _own(choice_BTk: Tensor, mesh: Mesh, context: Any) -> Tensor:
    part_of_rank = sequence.own_part(mesh, context=context)
    return part_of_rank(choice_BTk.chunk(mesh.layout.data_ranks)[mesh.data_rank])


@contextmanager
def _routed(model: nn.Module, wanted: list[Tensor] | None, *, keep: bool) -> Iterator[list[Tensor]]:
    with forced_choices(model, wanted) if wanted else nullcontext():
        if not keep:
            yield []
            return
        with recorded_choices(model) as taken:
            yield taken


def _full(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
