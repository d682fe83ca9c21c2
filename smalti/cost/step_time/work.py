"""The work of a rank in one step, as a list: products by shape, kernels by elements.

The products' ``flops`` over forward and backward are those of ``cost/flops.py`` with causal attention, to the
FLOP (a test checks all presets); recomputation is counted separately. The list follows the calls of ``smalti/model``,
``train/cross_entropy.py`` and ``train/step.py``; times are in ``cost/step_time/step.py``.

Shapes: N tokens of a microbatch, D hidden, F inside an MLP, V vocabulary, E experts, S = N k slots.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from smalti.config.model import ModelConfig
from smalti.config.optimizer import OPTIMIZERS
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.memory.head import Head, resolved_tile_bytes
from smalti.cost.params import count

Part = Literal[
    "embedding", "norms", "projections", "rotation", "attention", "mlp", "activation", "router", "dispatch", "experts",
    "residual", "loss", "weights", "clip", "optimizer", "recomputation",
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Numbers that a kind of kernel reads and writes for each of its elements."""

    values: float
    """Numbers in the compute format."""
    fp32_values: float = 0.0
    """Numbers in fp32, whatever the compute format is."""
    kernels: int = 1
    """Launches."""
    fuses: bool = True
    """True if torch.compile fuses it with its neighbours, so that values between them stay in registers."""


KINDS: dict[str, Kind] = {
    "add": Kind(3),
    "multiply": Kind(3),
    "copy": Kind(2, fuses=False),
    "cast": Kind(1, 1, fuses=False),
    "cast_back": Kind(1, 1, fuses=False),
    "fill": Kind(1, fuses=False),
    "accumulate": Kind(0, 3, fuses=False),
    **{name: Kind(2) for name in ("silu", "gelu", "gelu_tanh", "relu")},
    **{f"{name}_backward": Kind(3) for name in ("silu", "gelu", "gelu_tanh", "relu")},
    **{name: Kind(2) for name in ("rmsnorm", "layernorm")},
    **{f"{name}_backward": Kind(4, kernels=2) for name in ("rmsnorm", "layernorm")},
    "rotate": Kind(7, kernels=3),
    "rotate_backward": Kind(7, kernels=3),
    "gather": Kind(2, fuses=False),
    "bag": Kind(2, fuses=False),
    "slots": Kind(0, 16, kernels=6, fuses=False),
    "router": Kind(0, 24, kernels=30, fuses=False),
    "router_backward": Kind(0, 16, kernels=20, fuses=False),
    "cross_entropy": Kind(4, 4, kernels=12, fuses=False),
    "square_norm": Kind(0, 1, fuses=False),
    "scale": Kind(0, 2, fuses=False),
    "average": Kind(0, 3, fuses=False),
    **{
        name: Kind(0, rule.update_values, kernels=rule.update_kernels, fuses=False) for name, rule in OPTIMIZERS.items()
    },
}
"""Kinds of kernels. Their elements are those of the output, except for ``router`` (tokens x experts), ``slots`` (tokens
x chosen experts), ``gather`` and ``bag`` (rows x width), ``cross_entropy`` (tokens x vocabulary) and kernels over all
parameters."""


@dataclass(frozen=True)
class Work:
    """A kind of work, done ``count`` times in a step."""

    part: Part
    kind: str
    """A key of ``KINDS``; or ``nt``, ``nn``, ``tn``, a product by the layout of its operands; or ``attention`` of one
    head over one row, ``attention_backward``."""
    count: float
    shape: tuple[float, float, float] = (0, 0, 0)
    """M, K, N of a product; of attention the tokens of a row, a head's width, and the pairs of query and key."""
    elements: float = 0
    """Elements of a kernel."""
    flops: float = 0
    """FLOPs of one; a multiply-add is two, and elementwise work has none."""
    again_flops: float = 0
    """FLOPs of one that are recomputed."""
    fp32: bool = False
    """True if it is in fp32 whatever the compute format is."""
    ragged: bool = False
    """True for a product over the tokens of an expert, whose number varies."""
    launches: float = 1
    """Launches of one, if it is not in ``KINDS``."""


@dataclass(frozen=True)
class Share:
    """The share of a model and a batch on one rank."""

    tokens: int
    """Tokens in one forward and backward pass."""
    seq_len: int
    passes: float
    """Microbatches of a step."""
    layout: Layout
    recomputes: bool


def works(config: RunConfig, share: Share) -> list[Work]:
    """Return the work of ``share.passes`` forward and backward passes on one rank; ``update`` has the rest of a step.

    With pipeline stages it is a rank's mean share of the blocks, and both ends, which two of the ranks have.
    """
    model, result = config.model, list[Work]()
    kinds = Counter((model.has_experts(layer), model.window(layer)) for layer in range(model.num_hidden_layers))
    for (experts, window), layers in kinds.items():
        forward, backward = _block(model, share, experts=experts, window=window)
        if share.recomputes:
            backward += [
                replace(work, part="recomputation", flops=0, again_flops=work.flops + work.again_flops)
                for work in forward
            ]
        times = layers * share.passes / share.layout.pipeline
        result += [replace(work, count=work.count * times) for work in (*forward, *backward)]
    ends = [*_embedding(model, share), *_loss(config, share)]
    return result + [replace(work, count=work.count * share.passes) for work in ends]


def product(part: Part, kind: str, m: float, k: float, n: float, times: float = 1, **rest: bool) -> Work:
    """Return a product [M, K] x [K, N] of 2 M K N FLOPs."""
    return Work(part, kind, times, (m, k, n), flops=2 * m * k * n, **rest)


def linear(part: Part, tokens: float, width: float, out: float, times: float = 1) -> tuple[list[Work], list[Work]]:
    """Return a linear layer's forward, and the gradients of its input and weight."""
    backward = [product(part, "nn", tokens, out, width, times), product(part, "tn", out, tokens, width, times)]
    return [product(part, "nt", tokens, width, out, times)], backward


def kernel(part: Part, kind: str, elements: float, times: float = 1) -> Work:
    """Return a kernel over so many elements."""
    return Work(part, kind, times, elements=elements)


# ---- a block --------------------------------------------------------------------------------------------------------


def _block(model: ModelConfig, share: Share, *, experts: bool, window: int | None) -> tuple[list[Work], list[Work]]:
    """Forward and backward of one block over one microbatch."""
    hidden = share.tokens * model.hidden_size
    forward = [kernel("norms", model.norm, hidden, 2), kernel("residual", "add", hidden, 2)]
    backward = [kernel("norms", f"{model.norm}_backward", hidden, 2), kernel("residual", "add", hidden, 2)]
    if model.residual_multiplier != 1:
        forward.append(kernel("residual", "multiply", hidden, 2))
        backward.append(kernel("residual", "multiply", hidden, 2))
    mlp = _experts(model, share) if experts else _mlp(model, share, model.intermediate_size)
    for more_forward, more_backward in (_attention(model, share, window), mlp):
        forward += more_forward
        backward += more_backward
    return forward, backward


def _attention(model: ModelConfig, share: Share, window: int | None) -> tuple[list[Work], list[Work]]:
    tokens, hidden, width = share.tokens, model.hidden_size, model.width_per_head
    heads, kv_heads = model.num_attention_heads / share.layout.tensor, model.kv_heads / share.layout.tensor
    both = tokens * (heads + kv_heads) * width
    forward, backward = list[Work](), list[Work]()
    for out, times in ((heads * width, 1), (kv_heads * width, 2)):
        more_forward, more_backward = linear("projections", tokens, hidden, out, times)
        forward, backward = forward + more_forward, backward + more_backward
    more_forward, more_backward = linear("projections", tokens, heads * width, hidden)
    forward, backward = forward + more_forward, backward + more_backward
    backward.append(kernel("projections", "add", tokens * hidden, 2))  # gradients of what q, k and v read add up
    if model.attention_bias:
        backward.append(kernel("projections", "copy", both + tokens * (kv_heads * width + hidden)))
    if model.qk_norm:
        forward.append(kernel("norms", "rmsnorm", both))
        backward.append(kernel("norms", "rmsnorm_backward", both))
    if model.clip_qkv:
        forward.append(kernel("projections", "multiply", both + tokens * kv_heads * width))
        backward.append(kernel("projections", "multiply", both + tokens * kv_heads * width))
    if model.position == "rope":
        forward.append(kernel("rotation", "rotate", both))
        backward.append(kernel("rotation", "rotate_backward", both))
    # Of a row of ``seq_len`` tokens each rank of the sequence axis has all tokens of some heads (Ulysses).
    rows_heads = tokens / share.seq_len * heads
    seen = min(share.seq_len, window or share.seq_len)
    pairs = share.seq_len * seen - seen**2 / 2
    shape, launches = (share.seq_len, width, pairs), 1 / rows_heads  # all heads of all rows at once
    forward.append(Work("attention", "attention", rows_heads, shape, flops=4 * width * pairs, launches=launches))
    backward.append(
        replace(forward[-1], kind="attention_backward", flops=8 * width * pairs, again_flops=2 * width * pairs)
    )
    return forward, backward


def _mlp(model: ModelConfig, share: Share, inner: float) -> tuple[list[Work], list[Work]]:
    tokens, hidden, inner = share.tokens, model.hidden_size, inner / share.layout.tensor
    forward, backward = linear("mlp", tokens, hidden, inner, 2 if model.gated else 1)
    down = linear("mlp", tokens, inner, hidden)
    forward, backward = forward + down[0], backward + down[1]
    forward.append(kernel("activation", model.activation, tokens * inner))
    backward.append(kernel("activation", f"{model.activation}_backward", tokens * inner))
    if model.gated:
        forward.append(kernel("activation", "multiply", tokens * inner))
        backward.append(kernel("activation", "multiply", tokens * inner, 2))
        backward.append(kernel("mlp", "add", tokens * hidden))
    return forward, backward


def _experts(model: ModelConfig, share: Share) -> tuple[list[Work], list[Work]]:
    assert model.moe is not None
    moe, tokens, hidden = model.moe, share.tokens, model.hidden_size
    experts, inner = moe.num_experts, model.expert_width / share.layout.tensor
    slots = tokens * moe.num_experts_per_tok
    ranks = share.layout.expert  # experts / ranks here, each with the slots of all of them
    rows_per_expert, local_experts = slots * ranks / experts, experts / ranks
    forward = [
        kernel("router", "cast_back", tokens * hidden),
        product("router", "nt", tokens, hidden, experts, fp32=True),
        kernel("router", "router", tokens * experts),
        kernel("dispatch", "slots", slots),
        kernel("dispatch", "gather", slots * hidden),
        kernel("dispatch", "bag", slots * hidden),
        kernel("activation", model.activation, slots * inner),
    ]
    backward = [
        product("router", "nn", tokens, experts, hidden, fp32=True),
        product("router", "tn", experts, tokens, hidden, fp32=True),
        kernel("router", "cast_back", tokens * hidden),
        kernel("router", "cast", tokens * hidden),
        kernel("router", "router_backward", tokens * experts),
        kernel("residual", "add", tokens * hidden),  # router and experts read the same
        kernel("dispatch", "gather", slots * hidden, 2),
        kernel("dispatch", "multiply", slots * hidden),
        kernel("dispatch", "bag", slots * hidden, 3 if model.gated else 2),
        kernel("activation", model.activation, slots * inner),
        kernel("activation", f"{model.activation}_backward", slots * inner),
    ]
    if model.gated:
        forward.append(kernel("activation", "multiply", slots * inner))
        backward.append(kernel("activation", "multiply", slots * inner, 3))
        backward.append(kernel("dispatch", "add", tokens * hidden))
    for width, out, kind in ((hidden, inner, "nt"), (inner, hidden, "nn")):
        times = local_experts * (2 if model.gated and kind == "nt" else 1)
        other = "nn" if kind == "nt" else "nt"
        forward.append(product("experts", kind, rows_per_expert, width, out, times, ragged=True))
        backward.append(product("experts", other, rows_per_expert, out, width, times, ragged=True))
        backward.append(
            product(
                "experts", "tn", model.expert_width / share.layout.tensor, rows_per_expert, hidden, times, ragged=True
            )
        )
    if moe.num_shared_experts:
        shared = _mlp(model, share, moe.num_shared_experts * model.expert_width)
        forward, backward = forward + shared[0], backward + shared[1]
        forward.append(kernel("residual", "add", tokens * hidden))
        backward.append(kernel("residual", "add", tokens * hidden))
    return forward, backward


# ---- both ends, and the update ------------------------------------------------------------------------------------


def _embedding(model: ModelConfig, share: Share) -> list[Work]:
    hidden, vocabulary = share.tokens * model.hidden_size, model.vocab_size / share.layout.tensor
    work = [
        kernel("embedding", "gather", hidden, 2),
        kernel("embedding", "fill", vocabulary * model.hidden_size),
        kernel("norms", model.norm, hidden, 1 + model.embedding_norm),
        kernel("norms", f"{model.norm}_backward", hidden, 1 + model.embedding_norm),
    ]
    if model.tie_word_embeddings:
        work.append(kernel("embedding", "add", vocabulary * model.hidden_size))
    return work


def _loss(config: RunConfig, share: Share) -> list[Work]:
    """Return the head's three products over tiles of logits, and the loss (``train/cross_entropy.py``)."""
    model, tokens, hidden = config.model, share.tokens, config.model.hidden_size
    vocabulary = model.num_labels or model.vocab_size / share.layout.tensor
    rows, columns = loss_tile(config, tokens, vocabulary)
    tiles = -(-tokens // rows) * -(-vocabulary // columns)
    rows, columns = min(rows, tokens), min(columns, vocabulary)
    times = tokens * vocabulary / (rows * columns)
    work = [
        product("loss", "nt", rows, hidden, columns, times),
        product("loss", "nn", rows, columns, hidden, times),
        product("loss", "tn", columns, rows, hidden, times),
        kernel("loss", "cross_entropy", rows * columns, times),
        kernel("loss", "multiply", tokens * hidden, 3),
        kernel("loss", "multiply", vocabulary * hidden),
    ]
    if columns < vocabulary:  # logits are recomputed once all log-partitions are known
        again = product("loss", "nt", rows, hidden, columns, times)
        work.append(replace(again, flops=0, again_flops=again.flops))
        work.append(kernel("loss", "accumulate", tokens * hidden, tiles))
    elif rows < tokens:
        work.append(kernel("loss", "accumulate", vocabulary * hidden, tiles))
    return work


def loss_tile(config: RunConfig, tokens: float, vocabulary: float) -> tuple[float, float]:
    """Return tokens and vocabulary entries of a tile of logits, by the rule that memory uses."""
    model, compute_bytes = config.model, 4 if config.train.precision.compute == "fp32" else 2
    soft_cap, tile_bytes = model.final_logit_softcapping is not None, resolved_tile_bytes(config.train.loss)
    return Head(tokens, model.hidden_size, vocabulary, compute_bytes, soft_cap, tile_bytes).cut()


def update(config: RunConfig, layout: Layout, passes: float) -> list[Work]:
    """Return the work on a rank's parameters: FSDP's casts and copies in each pass, then norm, clip and optimizer."""
    whole = whole_params(config, layout)
    shard = count(config.model).total / (layout.tensor * layout.pipeline * layout.weight_shards)
    work = [
        kernel("weights", "cast", shard, passes),
        kernel("weights", "copy", whole, passes),
        kernel("weights", "cast_back", whole, passes),
        kernel("clip", "square_norm", shard),
        kernel("clip", "scale", shard),
        kernel("optimizer", config.train.optimizer.name, shard),
    ]
    if passes > 1:
        work.append(kernel("weights", "accumulate", shard, passes - 1))
    if config.train.ema is not None:
        work.append(kernel("optimizer", "average", shard))
    return work


def whole_params(config: RunConfig, layout: Layout) -> float:
    """Return the parameters that a rank computes with: all gathered ones, without other ranks' experts."""
    params = count(config.model)
    experts = params.mlp if config.model.moe is not None and layout.expert > 1 else 0
    return (params.total - experts + experts / layout.expert) / (layout.tensor * layout.pipeline)
