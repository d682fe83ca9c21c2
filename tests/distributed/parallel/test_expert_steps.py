"""Steps of a model whose experts lie on several ranks, against one process; and its checkpoints at other layouts."""

from functools import cache
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
import torch.distributed as dist
from conftest import PROVE
from gloo_ranks import run_ranks
from tiny_models import write_byte_tokens
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from smalti.config.model import ModelConfig, MoEConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.parallel import DispatchMode, ParallelConfig
from smalti.config.run import RunConfig
from smalti.config.train import LossConfig, PrecisionConfig
from smalti.cost.axes import Layout
from smalti.distributed.checkpoint import checkpoint, saver
from smalti.distributed.group import mesh as meshes
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.dtensors import local
from smalti.distributed.parallel.parallelize import parallelize
from smalti.evals.in_loop import heldout_hook
from smalti.model.blocks.moe.choices import forced_choices, recorded_choices
from smalti.model.blocks.moe.experts import Experts
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer, moments
from smalti.train.step import TrainState, train_step

ROWS, TIME, VOCAB = 8, 12, 64
CPU = torch.device("cpu")
ONE = Layout()
HYBRID = Layout(replicate=2, shard=2, expert=2)
MIXED = Layout(shard=4, expert=2)


def _config(kernel: Any = "grouped") -> ModelConfig:
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, num_shared_experts=1, kernel=kernel, router_lr_frac=0.5)
    return ModelConfig(
        family="decoder", norm="layernorm", vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, moe=moe,
    )  # fmt: skip


def _state(
    layout: Layout,
    dispatch: DispatchMode,
    *,
    kernel: str = "grouped",
    recomputed: bool = False,
    optimizer: str = "adamw",
) -> TrainState:
    config = _config(kernel)
    with torch.device("meta"):
        model = Decoder(config)
    mesh = meshes.build(CPU, layout)
    parallel = ParallelConfig(
        expert="auto", dispatch=dispatch, activation_checkpointing="full" if recomputed else "none"
    )
    parallelize(model, mesh, parallel, PrecisionConfig(compute="fp32"))
    fsdp.materialize(model, CPU, lambda name, shape: draw(name, shape, config, 1))
    described = OptimizerConfig(lr=1e-3) if optimizer == "adamw" else OptimizerConfig(name="lion", lr=1e-3, eps=None)
    return TrainState(model, build_optimizer(model, described), lambda step: 1e-3, clip_norm=0.5)


def _rows(seed: int) -> Microbatch:
    """A global batch with unequal numbers of masked targets, one row all masked."""
    random = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, VOCAB, (2, ROWS, TIME), generator=random)
    for row in range(ROWS):
        targets[row, :row] = IGNORE
    targets[3] = IGNORE
    positions = torch.arange(TIME).expand(ROWS, TIME).contiguous()
    return Microbatch(inputs, targets, positions, (positions >= 5).long())


def _own(rows: Microbatch, microbatches: int, *, uneven: bool) -> list[Microbatch]:
    """This rank's part. ``uneven``: rank 0 has a row more than its share, rank 1 one less."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = [ROWS * n // world for n in range(world + 1)]
    if uneven and world > 1:
        ends[1] += 1
    assert rows.documents is not None
    parts = (rows.inputs, rows.targets, rows.positions, rows.documents)
    mine = [part[ends[rank] : ends[rank + 1]].chunk(microbatches) for part in parts]
    return [Microbatch(*parts) for parts in zip(*mine, strict=True)]


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def _stepped(rank: int, layout: Layout, dispatch: DispatchMode, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps: the figures, the gradients of the last and the weights after it, all whole."""
    options = dict(options)
    microbatches, uneven = options.pop("microbatches", 1), options.pop("uneven", False)
    state = _state(layout, dispatch, **options)
    loss = LanguageLoss(_config(), LossConfig())
    results = [train_step(state, _own(_rows(seed), microbatches, uneven=uneven), loss) for seed in range(2)]
    named = dict(state.model.named_parameters())
    return {
        "loss": [float(result.loss) for result in results],
        "norm": [float(result.grad_norm) for result in results],
        "gradients": _whole({name: p.grad for name, p in named.items() if p.grad is not None}),
        "weights": _whole(dict(named)),
    }


@cache
def _of_one_process(optimizer: str) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(1, _stepped, ONE, "exact", {"optimizer": optimizer})[0]
    return result


def _assert_alike(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert result["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
    for kind in ("gradients", "weights"):
        assert result[kind].keys() == wanted[kind].keys()
        for name, tensor in wanted[kind].items():
            assert float((result[kind][name] - tensor).norm() / tensor.norm()) < 2e-5, (kind, name)


Case = tuple[Layout, DispatchMode, dict[str, Any]]
FLAT = Layout(shard=2, expert=2)
ON_TWO: list[Case] = [(FLAT, "exact", {"uneven": True}), (FLAT, "static", {"microbatches": 2})]
ON_FOUR: list[Case] = [
    (HYBRID, "exact", {"recomputed": True, "uneven": True}),
    (MIXED, "static", {"optimizer": "lion"}),
]
if PROVE:
    ON_FOUR += [(HYBRID, "static", {"recomputed": True}), (MIXED, "exact", {"kernel": "loop"})]


def _each(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [_stepped(rank, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ON_TWO, ON_FOUR], ids=["two", "four"])
def test_steps_are_those_of_one_process(cases: list[Case]) -> None:
    results = run_ranks(cases[0][0].world_size, _each, cases)
    for number, (_, _, options) in enumerate(cases):
        _assert_alike(results[0][number], _of_one_process(options.get("optimizer", "adamw")))
        assert all(result[number]["norm"] == results[0][number]["norm"] for result in results)


@pytest.mark.exhaustive
def test_twenty_steps_with_the_choices_of_one_process(tmp_path: Path) -> None:
    axes = {"replicate": 2, "shard": 2, "expert": 2, "dispatch": "static"}
    reference = mesh_runs.run_on(1, mesh_runs.config_of(tmp_path, "moe", "one", 20), 20)
    spread = mesh_runs.config_of(tmp_path, "moe", "spread", 20, 4, **axes)
    spread_run = mesh_runs.run_on(4, spread, 20, reference, replay=True)
    assert spread_run.loss == pytest.approx(reference.loss, rel=1e-5)
    assert spread_run.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _tensors(state: TrainState) -> dict[str, Tensor]:
    weights = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    return {**weights, **moments(state.model, state.optimizer)}


def _saved(rank: int, layout: Layout, folder: Path) -> tuple[str, dict[str, Tensor]]:
    state = _state(layout, "exact")
    train_step(state, _own(_rows(0), 1, uneven=False), LanguageLoss(_config(), LossConfig()))
    path = saver.save(folder, 1, _tensors(state), {"step": 1}, keep=1)
    return path, _whole(_tensors(state))


def _loaded(rank: int, layout: Layout, path: str) -> dict[str, Tensor]:
    state = _state(layout, "static")
    with torch.no_grad():
        for tensor in _tensors(state).values():
            local(tensor).fill_(-1)
    checkpoint.load(path, _tensors(state))
    return _whole(_tensors(state))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saver", "loaders"),
    [(HYBRID, [ONE, Layout(shard=2), Layout(shard=2, expert=2), MIXED] if PROVE else [ONE, MIXED]), (ONE, [MIXED])],
)
def test_a_checkpoint_of_one_layout_has_the_same_bits_in_any_other(
    saver: Layout, loaders: list[Layout], tmp_path: Path
) -> None:
    path, wanted = run_ranks(saver.world_size, _saved, saver, tmp_path)[0]
    stored = {f"model.{name}": tensor for name, tensor in checkpoint.read_model(path).items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in stored.items())
    for layout in loaders:
        for tensors in run_ranks(layout.world_size, _loaded, layout, path):
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items()), layout


def _placed(rank: int) -> dict[str, Any]:
    """Return mesh, placements and local shape of an expert weight, and how it was drawn."""
    state = _state(HYBRID, "exact")
    name, parameter = next((n, p) for n, p in state.model.named_parameters() if "experts.up_proj" in n)
    assert isinstance(parameter, DTensor)
    whole = draw(name, parameter.shape, _config(), 1)
    return {
        "dims": parameter.device_mesh.mesh_dim_names,
        "placements": parameter.placements,
        "here": tuple(parameter.to_local().shape),
        "drawn alike": torch.equal(parameter.full_tensor(), whole),
        "groups": len({p.device_mesh for group in state.optimizer.param_groups for p in group["params"]}),
    }


@pytest.mark.slow
def test_a_rank_holds_its_experts_cut_along_their_width() -> None:
    for experts in run_ranks(4, _placed):
        assert experts["dims"] == ("replicate", "expert_shard", "expert")
        assert experts["placements"][1:] == (Shard(1), Shard(0))
        assert experts["here"] == (2, 16, 32)
        assert experts["drawn alike"]
        assert experts["groups"] == 2


# ---- held-out loss, and bf16 ----------------------------------------------------------------------------------------


def _heldout_config(folder: str) -> RunConfig:
    tree = {
        "name": "r",
        "model": _config().model_dump() | {"vocab_size": 257},
        "data": {
            "sources": {"text": folder}, "heldout": {"text": folder}, "seq_len": 16,
            "stages": [{"weights": {"text": 1}}],
        },
        "train": {"duration": "1step", "global_batch_tokens": 32, "optimizer": {"lr": 1e-3}, "eval_tokens": 5 * 16},
    }  # fmt: skip
    return RunConfig.model_validate(tree)


def _measured(rank: int, layout: Layout, folder: str) -> dict[str, float]:
    config = _heldout_config(folder)
    with torch.device("meta"):
        model = Decoder(config.model)
    mesh = meshes.build(CPU, layout)
    parallelize(model, mesh, ParallelConfig(expert="auto", dispatch="static"), PrecisionConfig(compute="fp32"))
    fsdp.materialize(model, CPU, lambda name, shape: draw(name, shape, config.model, 1))
    hook = heldout_hook(config, mesh=mesh)
    assert hook is not None
    return hook(model, 0)


def test_held_out_loss_of_five_rows_on_two_ranks_with_buffers_of_one_size(tmp_path: Path) -> None:
    folder = write_byte_tokens(tmp_path / "tokens", ["what was said " * 9, "and what was not"])
    (wanted,) = run_ranks(1, _measured, ONE, folder)
    for metrics in run_ranks(2, _measured, Layout(shard=2, expert=2), folder):
        assert metrics == pytest.approx(wanted, rel=1e-6)


def _rounded(rank: int, layout: Layout, choices: list[Tensor] | None) -> dict[str, Any]:
    """A forward pass in bf16: the dtypes into and out of the experts' forward; the choices where none are given."""
    config = _config()
    with torch.device("meta"):
        model = Decoder(config)
    mesh = meshes.build(CPU, layout)
    parallelize(model, mesh, ParallelConfig(), PrecisionConfig())
    fsdp.materialize(model, CPU, lambda name, shape: draw(name, shape, config, 1))
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_hook(lambda _, args, out: seen.extend([args[0].dtype, args[2].dtype, out.dtype]))
    rows = _own(_rows(0), 1, uneven=False)[0]
    if choices is None:
        with recorded_choices(model) as taken:
            logits = model(rows.inputs).value
    else:
        parts = [choice.chunk(dist.get_world_size())[rank] for choice in choices]
        with forced_choices(model, parts):
            logits, taken = model(rows.inputs).value, []
    return {"logits": logits.detach().float(), "seen": seen, "choices": [choice.clone() for choice in taken]}


@pytest.mark.slow
def test_in_bf16_the_weights_of_the_choices_stay_in_fp32_and_the_result_is_alike() -> None:
    (wanted,) = run_ranks(1, _rounded, ONE, None)
    results = run_ranks(2, _rounded, Layout(shard=2, expert=2), wanted["choices"])
    logits = torch.cat([result["logits"] for result in results])
    assert float((logits - wanted["logits"]).norm() / wanted["logits"].norm()) < 5e-3
    for result in results:
        assert result["seen"] == [torch.bfloat16, torch.float32, torch.bfloat16] * 2
