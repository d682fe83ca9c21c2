"""Measures the parts of a training step on this machine: ``python -m smalti.fleet.probes.machine --threads 2``.

Prints progress to stderr, and to stdout one JSON object: the section ``measured`` of a device
(``smalti.config.measured``), without ``collective``. Takes about half a minute a format. The kernels are those of
``smalti.cost.step_time.work.KINDS``. A time is the shortest of several repeats, in two rounds some seconds apart,
because other programs slow the machine down in bursts.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.sgd import sgd

SIDES = (64, 256, 1024, 4096)
LARGEST_FLOPS = 2**32
ELEMENTS = (2**12, 2**15, 2**18, 2**20, 2**22)
ROWS = (128, 256, 512, 1024, 2048)
HEAD_WIDTHS = (32, 64, 128)
_REPEATS, _ENOUGH_S, _TURNS = 6, 0.02, 2
_MAX_SLOTS = 2**20
_WIDTH = 256
"""Width of the rows of norms and gathers."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Timed = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure with the options of the command line and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--format", choices=DTYPES, action="append", help="default: all")
    arguments = parser.parse_args()
    formats = tuple(arguments.format or DTYPES)
    print(json.dumps(_rounded(measure(arguments.threads, formats))))


def measure(threads: int = 0, formats: tuple[str, ...] = ("bf16", "fp32")) -> dict[str, Any]:
    """Measure products, attention and kernels on the CPU."""
    from smalti.distributed.group.allocator import keep_freed_memory

    device = torch.device("cpu")
    if threads > 0:
        torch.set_num_threads(threads)
    keep_freed_memory()
    measured: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "software": f"torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "matmul": {}, "attention": {}, "kernels": {},
    }  # fmt: skip
    for turn, name in itertools.product(range(_TURNS), formats):
        dtype, again = DTYPES[name], f", {turn + 1} of {_TURNS}"
        _report(f"matrix products in {name}{again}")
        _merge(measured["matmul"], name, products(device, dtype))
        _report(f"attention in {name}{again}")
        _merge(measured["attention"], name, attention(device, dtype))
        _report(f"kernels in {name}{again}")
        _merge(measured["kernels"], name, kernels(device, dtype))
    for name in formats:
        measured["matmul"][name] = {
            kind: [[m, k, n, 2 * m * k * n / took_s] for m, k, n, took_s in points]
            for kind, points in measured["matmul"][name].items()
        }
        measured["kernels"][name] = {kind: _rising(points) for kind, points in measured["kernels"][name].items()}
    return measured


def _merge(all_of: dict[str, Any], name: str, new: Any) -> None:
    """Merge the times of a round: the shorter of two."""
    all_of[name] = _shorter(all_of[name], new) if name in all_of else new


def _shorter(old: Any, new: Any) -> Any:
    if isinstance(old, dict):
        return {kind: _shorter(old[kind], new[kind]) for kind in old}
    if isinstance(old, list):
        return [_shorter(*both) for both in zip(old, new, strict=True)]
    return min(old, new)


def _rounded(value: Any) -> Any:
    """Return ``value`` with all floats rounded to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _report(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def seconds(work: Callable[[], Any], device: torch.device, runs: int = 1) -> float:
    """Return the seconds of one ``work``: the shortest of several repeats of ``runs`` in a row."""

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(runs):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / runs

    timed()
    repeats: list[float] = []
    while len(repeats) < _REPEATS and (len(repeats) < 3 or sum(repeats) * runs < _ENOUGH_S):
        repeats.append(timed())
    return min(repeats)


# ---- products -----------------------------------------------------------------------------------------------------


def products(device: torch.device, dtype: torch.dtype) -> dict[str, list[list[float]]]:
    """Measure [M, K, N, seconds] for each layout of operands."""
    by_layout: dict[str, list[list[float]]] = {"nt": [], "nn": [], "tn": []}
    for m, k, n in itertools.product(SIDES, repeat=3):
        if 2 * m * k * n > LARGEST_FLOPS:
            continue
        for kind, times in by_layout.items():
            left, right = _operands(kind, (m, k, n), device, dtype)
            runs = max(1, min(20, 2**24 // (m * k * n)))
            took_s = seconds(lambda left=left, right=right: left @ right, device, runs)  # type: ignore[misc]
            times.append([m, k, n, took_s])
    return by_layout


def _operands(
    kind: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    left = random((k, m) if kind == "tn" else (m, k), device, dtype)
    right = random((n, k) if kind == "nt" else (k, n), device, dtype)
    return (left.t() if kind == "tn" else left), (right.t() if kind == "nt" else right)


def random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return random numbers: a GPU needs less power for constants, and multiplies them faster."""
    return torch.randn(shape, device=device).to(dtype)


# ---- attention ----------------------------------------------------------------------------------------------------


def attention(device: torch.device, dtype: torch.dtype) -> list[list[float]]:
    """Measure [tokens, head width, forward s, backward s] of one head over one row, averaged over a batch."""
    from smalti.config.model import ModelConfig
    from smalti.model.blocks.attention.choice import kernels_of

    rows_of_times = []
    for tokens, width in itertools.product(ROWS, HEAD_WIDTHS):
        heads = 4
        rows = max(2, 4096 // tokens)
        model = ModelConfig(
            vocab_size=2, hidden_size=heads * width, intermediate_size=2, num_hidden_layers=1,
            num_attention_heads=heads,
        )  # fmt: skip
        attend = kernels_of(model, torch.empty(rows, tokens, 1, dtype=dtype, device=device), None)[None]
        # strides of the projections' output: [rows, tokens, heads, width]
        inputs = [random((rows, tokens, heads, width), device, dtype).transpose(1, 2) for _ in range(3)]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        forward_s, backward_s = times_of_passes(lambda inputs=inputs, attend=attend: attend(*inputs), inputs, device)  # type: ignore[misc]
        rows_of_times.append([tokens, width, forward_s / (rows * heads), backward_s / (rows * heads)])
    return rows_of_times


def times_of_passes(work: Callable[[], Tensor], inputs: list[Tensor], device: torch.device) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass."""
    gradient = torch.randn_like(work())
    forward_s = seconds(work, device)

    def both() -> None:
        torch.autograd.grad(work(), inputs, gradient)

    return forward_s, max(seconds(both, device) - forward_s, 0.1 * forward_s)


# ---- kernels ------------------------------------------------------------------------------------------------------


def kernels(device: torch.device, dtype: torch.dtype) -> dict[str, list[list[float]]]:
    """Measure kind -> [elements, seconds]."""
    by_kind: dict[str, list[list[float]]] = {}
    for elements in ELEMENTS:
        runs = max(1, min(50, 2**17 // elements))
        for name, work in _works(elements, device, dtype):
            with torch.no_grad():
                by_kind.setdefault(name, []).append([elements, seconds(work, device, runs)])
    return by_kind


def _rising(points: list[list[float]]) -> list[list[float]]:
    """Lower the times of sizes that took longer than a larger one, because another program ran."""
    for point, after in reversed(list(itertools.pairwise(points))):
        point[1] = min(point[1], after[1])
    return points


def _works(elements: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x = random((elements // _WIDTH, _WIDTH), device, dtype)
    y, x32 = torch.randn_like(x), x.float()
    yield "add", lambda: x + y
    yield "multiply", lambda: x * y
    yield "copy", lambda: y.copy_(x)
    yield "cast", lambda: x32.to(dtype) if dtype != torch.float32 else x32.clone()
    yield "cast_back", lambda: x.to(torch.float32) if dtype != torch.float32 else x.clone()
    yield "fill", lambda: torch.zeros_like(x)
    yield "accumulate", lambda: x32.add_(y)
    aten = torch.ops.aten
    yield "silu", lambda: F.silu(x)
    yield "silu_backward", lambda: aten.silu_backward(y, x)
    yield "gelu", lambda: F.gelu(x)
    yield "gelu_backward", lambda: aten.gelu_backward(y, x)
    yield "gelu_tanh", lambda: F.gelu(x, approximate="tanh")
    yield "gelu_tanh_backward", lambda: aten.gelu_backward(y, x, approximate="tanh")
    yield "relu", lambda: F.relu(x)
    yield "relu_backward", lambda: aten.threshold_backward(y, x, 0)
    yield from _of_rows(x, y)
    if elements <= _MAX_SLOTS:
        yield from _of_slots(x)
    yield from _of_logits(elements, device, dtype)
    yield from _of_parameters(elements, device)


def _of_rows(x: Tensor, y: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield norms and rotation."""
    from smalti.model.blocks.rope import _rotate_halves

    weight = torch.ones(_WIDTH, dtype=x.dtype, device=x.device)
    needs, w_needs = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for name, norm in (
        ("rmsnorm", lambda x: F.rms_norm(x, (_WIDTH,), w_needs, 1e-5)),
        ("layernorm", lambda x: F.layer_norm(x, (_WIDTH,), w_needs, None, 1e-5)),
    ):
        with torch.enable_grad():
            out = norm(needs)
        yield name, lambda norm=norm: norm(needs)  # type: ignore[misc]
        yield (
            f"{name}_backward",
            lambda out=out: torch.autograd.grad(out, (needs, w_needs), y, retain_graph=True),  # type: ignore[misc]
        )
    heads = x.view(1, -1, 4, _WIDTH // 4)
    cosine = torch.ones(1, heads.shape[1], 1, _WIDTH // 4, dtype=x.dtype, device=x.device)
    yield "rotate", lambda: _rotate_halves(heads, cosine, cosine, 1)
    yield "rotate_backward", lambda: _rotate_halves(heads, cosine, cosine, -1)


def _of_slots(x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield gathers of rows, sums of two, the sort of choices by expert, and scores and sums of a router of 8."""
    from smalti.model.blocks.moe.experts import slots
    from smalti.model.blocks.moe.router import Routing
    from smalti.model.blocks.moe.router_stats import router_stats

    rows, n = torch.randperm(x.shape[0], device=x.device), x.shape[0] // 2
    pairs, weights = rows.view(n, 2), torch.rand(n, 2, device=x.device).to(x.dtype)
    yield "gather", lambda: x.index_select(0, rows)
    yield "bag", lambda: F.embedding_bag(pairs, x, mode="sum", per_sample_weights=weights)
    chosen = torch.randint(8, (x.numel() // 2, 2), device=x.device)
    yield "slots", lambda: slots(chosen, 8)
    logits = torch.randn(1, x.numel() // 8, 8, device=x.device, requires_grad=True)
    mask = torch.ones(1, x.numel() // 8, dtype=torch.bool, device=x.device)

    def routed() -> Tensor:
        score = logits.softmax(dim=-1)
        expert = score.detach().topk(2, dim=-1).indices
        weight = score.gather(-1, expert)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        stats = router_stats(Routing(logits, score, expert, weight), mask)
        return stats.balance_sum + stats.z_sum + weight.sum()

    with torch.enable_grad():
        total = routed()

    def forward() -> None:
        with torch.enable_grad():
            routed()

    yield "router", forward
    yield "router_backward", lambda: torch.autograd.grad(total, logits, retain_graph=True)


def _of_logits(elements: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the kernels of ``train/cross_entropy.py`` on a tile of logits, without its products."""
    vocabulary = min(elements // 2, 4096)
    logits = random((elements // vocabulary, vocabulary), device, dtype)
    target = torch.randint(vocabulary, (logits.shape[0], 1), device=device)
    ones = torch.ones(target.shape, device=device)

    def tile() -> Tensor:
        probability = torch.softmax(logits, dim=-1, dtype=torch.float32)
        logits.amax(dim=-1).float() - probability.amax(dim=-1).log()
        logits.gather(1, target)
        probability.scatter_add_(1, target, -ones)
        return probability.to(dtype)

    yield "cross_entropy", tile


def _of_parameters(elements: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield clipping and updates in fp32, over eight tensors of weights and their gradients."""
    from smalti.config.optimizer import OPTIMIZERS

    weights = [nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)]
    gradients = [torch.randn_like(weight) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    yield "square_norm", lambda: torch._foreach_norm(gradients)
    yield "scale", lambda: torch._foreach_mul_(gradients, 0.999)
    averages = [torch.zeros_like(gradient) for gradient in gradients]
    yield "average", lambda: torch._foreach_lerp_(averages, gradients, 0.001)
    updates = {"adamw": torch.optim.AdamW(weights, lr=1e-9, fused=True).step, "lion": _lion_update(weights, gradients)}
    for name, rule in OPTIMIZERS.items():
        yield name, updates.get(name) or _passes(gradients, round(rule.update_values / 2))


def _lion_update(weights: list[nn.Parameter], gradients: list[Tensor]) -> Callable[[], None]:
    """Return a function that launches the kernels of ``Lion.step`` in ``smalti/train/optim.py``."""
    parameters: list[Tensor] = list(weights)
    averages = [torch.zeros_like(gradient) for gradient in gradients]

    def update() -> None:
        directions = list(torch._foreach_lerp(averages, gradients, 0.1))
        torch._foreach_sign_(directions)
        for values, changes in ((parameters, directions), (averages, gradients)):
            sgd(values, changes, [None] * len(values), fused=True, lr=1e-9, weight_decay=0.0, momentum=0.0,
                dampening=0.0, nesterov=False, maximize=False)  # fmt: skip

    return update


def _passes(tensors: list[Tensor], number: int) -> Callable[[], None]:
    """Return a function that reads and writes ``tensors`` so many times; for an optimizer without kernels here."""

    def scale() -> None:
        for _ in range(number):
            torch._foreach_mul_(tensors, 1.0)

    return scale


if __name__ == "__main__":
    main()
