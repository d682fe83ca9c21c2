"""The plan's collectives against those that torch makes in a real step on gloo: the same calls, to the byte."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from smalti.config.load import load
from smalti.config.model import ModelConfig, MoEConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout import collectives as plan
from smalti.cost.units import KEEP_GATHERED_BYTES, units
from smalti.distributed.group import mesh as meshes
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer
from smalti.train.step import TrainState, train_step
from smalti.train.vote import Vote

DENSE = ModelConfig(
    vocab_size=70, hidden_size=32, intermediate_size=50, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, qk_norm="head", family="decoder", tie_word_embeddings=True, attention_bias=True,
)  # fmt: skip
MIXED = ModelConfig(
    family="decoder", vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    moe=MoEConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=16, num_shared_experts=1,
                  mlp_only_layers=(0,), global_balance_loss_coef=0.01),
)  # fmt: skip
ROWS, TIME = 8, 16

_OPS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
}


class _Counting(TorchDispatchMode):
    """Counts the collectives that run under it: (op, bytes of the larger buffer) -> calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func.__name__.split(".")[0]
        if namespace in ("c10d", "_c10d_functional"):
            op, place = _OPS[name]
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            self.seen[op, sum(tensor.numel() * tensor.element_size() for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))


def _config(model: ModelConfig, microbatches: int, ranks: int, replicate: int, recomputes: bool) -> RunConfig:
    per_rank = ROWS * TIME // ranks
    base = load(RunConfig, "demo", [f"data.seq_len={TIME}", f"train.global_batch_tokens={ROWS * TIME}"]).config
    parallel = base.train.parallel.model_copy(
        update={"ranks": ranks, "replicate": replicate, "activation_checkpointing": "full" if recomputes else "none"}
    )
    train = base.train.model_copy(update={"microbatch_tokens": per_rank // microbatches, "parallel": parallel})
    return base.model_copy(update={"model": model, "train": train})


def _rows(rank: int, world_size: int, microbatches: int) -> list[Microbatch]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 60, (ROWS, TIME))
    positions = torch.arange(TIME).expand(ROWS, TIME).contiguous()
    mine = [tensor.chunk(world_size)[rank].chunk(microbatches) for tensor in (tokens, tokens, positions)]
    return [Microbatch(*parts, None) for parts in zip(*mine, strict=True)]


def _counted(rank: int, config: RunConfig, microbatches: int, keep_bytes: int) -> Counter[tuple[str, int]]:
    train, device = config.train, torch.device("cpu")
    fsdp._KEEP_GATHERED_BYTES = keep_bytes
    with torch.device("meta"):
        model = Decoder(config.model)
    mesh = meshes.build(device, Layout(train.parallel.replicate, dist.get_world_size() // train.parallel.replicate))
    parallelize(model, mesh, train.parallel, train.precision)
    fsdp.materialize(model, device, lambda name, shape: draw(name, shape, config.model, 1))
    loss = LanguageLoss(config.model, train.loss)
    state = TrainState(
        model, build_optimizer(model, train.optimizer), lambda step: 1e-3, clip_norm=1.0, loss_state=loss.state
    )
    vote, batch = Vote(plan.VOTES), _rows(rank, dist.get_world_size(), microbatches)
    train_step(state, batch, loss)
    with _Counting() as counting:  # the second step: the first one also sets things up
        vote.start(*[0] * plan.VOTES)
        train_step(state, batch, loss)
        vote.result()
    return counting.seen


def _planned(config: RunConfig) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for one in plan.collectives(config):
        found[one.op, one.bytes] += one.count
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "ranks", "replicate", "microbatches", "gives_back", "recomputes"),
    [
        pytest.param(DENSE, 2, 1, 2, True, False, marks=pytest.mark.slow),
        (MIXED, 2, 1, 1, True, False),
        pytest.param(MIXED, 4, 2, 1, True, True, marks=pytest.mark.slow),
        pytest.param(DENSE, 4, 4, 2, False, False, marks=pytest.mark.slow),
        pytest.param(MIXED, 4, 1, 2, False, False, marks=pytest.mark.slow),
    ],
)
def test_collectives_of_a_real_step(
    model: ModelConfig, ranks: int, replicate: int, microbatches: int, gives_back: bool, recomputes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keep_bytes = 0 if gives_back else 1 << 40
    monkeypatch.setattr("smalti.cost.units.KEEP_GATHERED_BYTES", keep_bytes)
    config = _config(model, microbatches, ranks, replicate, recomputes)
    planned = _planned(config)
    for rank, counted in enumerate(run_ranks(ranks, _counted, config, microbatches, keep_bytes)):
        assert counted == planned, f"rank {rank}"


def test_threshold_is_that_of_the_sharding() -> None:
    assert KEEP_GATHERED_BYTES == fsdp._KEEP_GATHERED_BYTES


@pytest.mark.parametrize("model", [DENSE, MIXED])
def test_units_are_those_that_are_sharded(model: ModelConfig) -> None:
    """Every parameter of the model is in the unit that owns it, with its rows."""
    with torch.device("meta"):
        decoder = Decoder(model)
    blocks = list(fsdp.blocks_of(decoder))
    routers = [m for block in blocks for m in block.modules() if getattr(m, "full_precision", False)]
    owned = {p: "router" for module in routers for p in module.parameters()}
    for layer, block in enumerate(blocks):
        name = "expert block" if model.has_experts(layer) else "block"
        owned = {**dict.fromkeys(block.parameters(), name), **owned}
    expected: Counter[tuple[str, int, int]] = Counter()
    for parameter in decoder.parameters():
        rows = parameter.shape[0]
        expected[owned.get(parameter, "root"), rows, parameter.numel() // rows] += 1
    found: Counter[tuple[str, int, int]] = Counter()
    for unit in units(model):
        for part in unit.parts:
            found[unit.name, part.rows, part.width] += unit.count
    assert found == expected


def test_a_rank_alone_makes_none() -> None:
    assert plan.collectives(_config(DENSE, 1, 1, 1, False)) == []
    assert plan.collectives(_config(DENSE, 1, 1, 1, False), Layout(shard=1)) == []
