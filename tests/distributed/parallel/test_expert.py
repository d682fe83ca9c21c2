"""Experts on other ranks against one process that has them all: forward, backward, and what the host may know."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.parallel import DispatchMode
from smalti.cost.axes import Layout
from smalti.distributed.group import mesh as meshes
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import expert, fsdp
from smalti.distributed.parallel.dispatch import Dispatch, ExactDispatch, StaticDispatch
from smalti.model.adapters.lora import LoRAExperts
from smalti.model.blocks.moe.experts import Experts
from smalti.model.decoder import Decoder

LAYOUTS = {
    2: [Layout(shard=2, expert=2)],
    4: [Layout(shard=4, expert=4), Layout(shard=4, expert=2), Layout(replicate=2, shard=2, expert=2)],
}
MODES: tuple[DispatchMode, ...] = ("exact", "static")
KINDS = ("random", "one expert takes all", "a rank without tokens", "one token")


def _config(**moe: Any) -> ModelConfig:
    fields = {"num_experts": 8, "num_experts_per_tok": 2} | moe
    return ModelConfig(
        family="decoder", vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, norm="layernorm", moe=fields,
    )  # fmt: skip


class Layer(nn.Module):
    """Experts and nothing else."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.experts = config, Experts(config)

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.experts(*args)
        return out


def _case(kind: str, seed: int, world: int, *, equal: bool, top_k: int) -> list[tuple[Tensor, ...]]:
    """(x, experts, weights, upstream) of each rank."""
    random = torch.Generator().manual_seed(seed)
    parts: list[tuple[Tensor, ...]] = []
    same = int(torch.randint(1, 12, (), generator=random))
    for _ in range(world):
        tokens = same if equal else int(torch.randint(1, 12, (), generator=random))
        tokens = 1 if kind == "one token" else tokens
        among = {"one expert takes all": top_k, "a rank without tokens": 4}.get(kind, 8)
        expert_Nk = torch.rand(tokens, among, generator=random).topk(top_k).indices
        x_ND, upstream_ND = torch.randn(2, tokens, 16, generator=random)
        parts.append((x_ND, expert_Nk, torch.rand(tokens, top_k, generator=random) + 0.1, upstream_ND))
    return parts


def _through(layer: nn.Module, x: Tensor, chosen: Tensor, weight: Tensor, upstream: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = layer(x, chosen, weight)
    (out * upstream).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


def _gradients(layer: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients if grad is not None]


def _spread(config: ModelConfig, mesh: Mesh, dispatch: DispatchMode, values: dict[str, Tensor]) -> nn.Module:
    with torch.device("meta"):
        layer = Layer(config)
    expert.apply(layer, mesh, dispatch=dispatch)
    fsdp.shard(layer, mesh, compute="fp32", reduce="fp32")
    fsdp.materialize(layer, torch.device("cpu"), lambda name, _: values[name])
    return layer


def _farthest(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) if b.numel() else 0.0
        for a, b in zip(actual, expected, strict=True)
    )


def _layers(rank: int, layouts: list[Layout], cases: int) -> dict[str, float]:
    """The largest difference from one process, of each layout, mode and kind of routing."""
    differences: dict[str, float] = {}
    for layout in layouts:
        mesh = meshes.build(torch.device("cpu"), layout)
        for number in range(cases):
            kind, mode = KINDS[number % 4], MODES[number // 4 % 2]
            kernel, top_k = ("grouped", "loop")[number // 8 % 2], (1, 2, 4)[number % 3]
            config = _config(num_experts_per_tok=top_k, kernel=kernel)
            torch.manual_seed(number)
            whole = Layer(config)
            values = {name: value.detach().clone() for name, value in whole.named_parameters()}
            layer = _spread(config, mesh, mode, values)
            parts = _case(kind, number, layout.world_size, equal=mode == "static", top_k=top_k)
            wanted = [_through(whole, *part) for part in parts]
            ours = _through(layer, *parts[rank])
            difference = max(_farthest(ours, wanted[rank]), _farthest(_gradients(layer), _gradients(whole)))
            differences[f"{layout}: {mode}, {kernel}, {kind}, top {top_k}"] = difference
    return differences


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_layer_is_that_of_one_process(world: int, proof: Any) -> None:
    for differences in run_ranks(world, _layers, LAYOUTS[world], proof(short=16, full=192)):
        assert max(differences.values()) < 1e-5, max(differences, key=lambda case: differences[case])


def _twice(rank: int) -> list[bool]:
    """Return whether the same input gives the same bits, and whether a choice of no expert gives zeros."""
    mesh, config = meshes.build(torch.device("cpu"), LAYOUTS[2][0]), _config()
    torch.manual_seed(0)
    values = {name: value.detach() for name, value in Layer(config).named_parameters()}
    part = _case("random", 3, 2, equal=True, top_k=2)[rank]
    equal = []
    for mode in MODES:
        first, second = (_through(_spread(config, mesh, mode, values), *part) for _ in range(2))
        equal.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    return equal


def test_the_same_input_gives_the_same_bits() -> None:
    assert run_ranks(2, _twice) == [[True, True]] * 2


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_choice_of_no_expert_gives_zero_and_takes_no_gradient(kernel: str, adapters: bool) -> None:
    torch.manual_seed(0)
    experts, x = Experts(_config(kernel=kernel)), torch.randn(6, 16, requires_grad=True)
    if adapters:
        experts = LoRAExperts(experts.requires_grad_(False), ["up_proj", "down_proj"], 3, 1.0)
        for weight in experts.parameters():
            nn.init.normal_(weight)
    trained = [weight for weight in experts.parameters() if weight.requires_grad]
    label = torch.tensor([8, 2, 8, 8, 0, 8])[:, None]
    for _ in range(3):  # what lies in memory differs from time to time
        out = experts.compute(x, label, None, has_unassigned_rows=True)
        gradient, *others = torch.autograd.grad(out.sum(), [x, *trained])
        assert all(other.isfinite().all() for other in others)
        none = label[:, 0] == 8
        assert not out[none].any()
        assert not gradient[none].any()
        assert out[~none].all()


# ---- what the host may know -----------------------------------------------------------------------------------------


class _NothingToTheHost(TorchFunctionMode):
    """Refuses every call that brings a value to the host."""

    REFUSED = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(function, "__name__", "") not in self.REFUSED, function
        return function(*args, **(kwargs or {}))


class _NoScalar(TorchDispatchMode):
    """Refuses what these come down to, in the backward pass too, and keeps the names of all that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(function))
        assert "_local_scalar_dense" not in self.ran[-1]
        assert "nonzero" not in self.ran[-1]
        assert (kwargs or {}).get("device") in (None, torch.device("cpu"))
        return function(*args, **(kwargs or {}))


def _fake_layer(mode: type[Dispatch]) -> tuple[Dispatch, tuple[Tensor, Tensor, Tensor]]:
    """One layer's dispatch among 4 ranks, and what goes in; tensors without values."""
    experts = Experts(_config())
    dispatch = mode(experts, dist.group.WORLD)  # type: ignore[arg-type]
    local_parts = [parameter[: dispatch.num_local_experts].bfloat16() for parameter in experts.parameters()]
    for (name, _), part in zip(list(dispatch.named_parameters()), local_parts, strict=True):
        setattr(dispatch, name, nn.Parameter(part))
    x = torch.randn(10, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(10, 2, requires_grad=True)
    return dispatch, (x, torch.zeros(10, 2, dtype=torch.int64), weight)


@pytest.fixture
def fake_world() -> Any:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_static_reads_no_value_and_its_buffers_hold_the_worst_case() -> None:
    with FakeTensorMode():
        dispatch, (x, chosen, weight) = _fake_layer(StaticDispatch)
        with _NothingToTheHost(), _NoScalar() as watched:
            out = dispatch.forward(x, chosen, weight)
            out.sum().backward()
        assert out.shape == x.grad.shape == x.shape  # type: ignore[union-attr]
        assert watched.ran.count("_c10d_functional.all_to_all_single.default") == 5  # counts, there and back, twice


@pytest.mark.usefixtures("fake_world")
def test_exact_reads_counts_once_and_can_assume_even_load() -> None:
    with FakeTensorMode():
        dispatch, inputs = _fake_layer(ExactDispatch)
        with pytest.raises(DataDependentOutputException):
            dispatch.forward(*inputs)
        dispatch.assumes_even_load = True  # type: ignore[attr-defined]
        with _NothingToTheHost():
            assert dispatch.forward(*inputs).shape == inputs[0].shape


@pytest.mark.usefixtures("fake_world")
def test_backward_keeps_the_rows_that_came_gate_up_and_the_rows_that_came_back() -> None:
    saved_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        dispatch, (x, chosen, weight) = _fake_layer(ExactDispatch)
        dispatch.assumes_even_load = True  # type: ignore[attr-defined]
        weights = dispatch.weights()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = dispatch.forward(x, chosen, weight)
        inputs = [weight, *(w for w in weights if w is not None)]
        saved_activation_bytes = sum(saved_bytes.values()) - sum(w.untyped_storage().nbytes() for w in inputs)
        slots, indices = 20, (4 * 20 + dispatch.num_local_experts // 2) * 8
        assert saved_activation_bytes == slots * (2 * 16 + 2 * 24) * 2 + indices
        del out


# ---- what is refused ------------------------------------------------------------------------------------------------


ON_TWO, ON_FOUR = Layout(replicate=2, shard=2, expert=2), Layout(shard=4, expert=4)
REFUSED: list[tuple[dict[str, Any] | None, Layout, str, str]] = [
    (None, ON_TWO, "the model has no experts", "expert=1"),
    ({"num_experts": 5}, ON_TWO, "5 experts are not a multiple", "expert=1"),
    ({"num_experts": 6}, ON_FOUR, "6 experts are not a multiple", "expert=2"),
    (
        {"intermediate_size": 27},
        Layout(shard=4, expert=2),
        "27 columns of an expert are not a multiple of 2",
        "expert=4",
    ),
]


def _refused(rank: int) -> list[tuple[str, str | None]]:
    errors = []
    for moe, layout, _, _ in REFUSED:
        config = _config(**(moe or {}))
        if moe is None:
            config = config.model_copy(update={"moe": None, "intermediate_size": 32})
        with torch.device("meta"):
            model = Decoder(config)
        mesh = meshes.build(torch.device("cpu"), layout)
        with pytest.raises(UserError) as caught:
            expert.apply(model, mesh, dispatch="exact")
        errors.append((str(caught.value), caught.value.hint))
    return errors


def test_what_does_not_divide_is_refused_with_the_nearest_size() -> None:
    for of_rank in run_ranks(4, _refused):
        for (message, nearest), (_, _, text, hint) in zip(of_rank, REFUSED, strict=True):
            assert text in message
            assert nearest == f"train.parallel.{hint}"
