"""Memory of serving a model: weights by format, KV cache and activations of a step, on one device or several.

Weights and cache are exact for their format and allocation; activations are estimated from the tensors of the widest
layer that are alive at one time. Not counted: the device's runtime (``devices.py`` reserves memory for it), a draft
model, adapters, shared prefixes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.cost.weights import KINDS, Weight, weights
from smalti.plan.serving.formats import kv_bytes_per_token, kv_format, tensor_bytes, weight_format

BLOCK_TOKENS = 16
"""Tokens of a block of a paged cache (vLLM's default)."""

GRAIN_TOKENS = 64
"""The smallest capacity of a row in this engine (equal to that of ``serve/engine/scheduler.py``, which a test
checks)."""

PREFILL_TOKENS = 2048
"""Assumption: most prompt tokens of a step, with chunked prefill (vLLM's ``max_num_batched_tokens``)."""

MAX_BATCH = 1_000_000

Cache = Literal["paged", "smalti"]


@dataclass(frozen=True)
class Load:
    """The load: ``batch`` requests of ``context_tokens`` each, prompt and answer together."""

    context_tokens: int
    batch: int = 1
    kv: str = "bf16"
    cache: Cache = "paged"
    """``paged``: whole blocks of 16 tokens, and in a layer with a window only the blocks within it. ``smalti``: the
    engine of ``smalti serve``, with rows of 64 x a power of two tokens in every layer, and spare rows."""
    prefill_tokens: int = PREFILL_TOKENS
    """Most prompt tokens that one step processes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", kv_format(self.kv))
        if self.cache not in ("paged", "smalti"):
            raise UserError(f"cache = '{self.cache}' is not known", allowed="paged, smalti")
        for name, most in (("context_tokens", 10**9), ("batch", MAX_BATCH), ("prefill_tokens", 10**9)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise UserError(f"{name} = {value} is not valid", allowed=f"a whole number from 1 to {most:,}")


@dataclass(frozen=True)
class Split:
    """The split of a model over devices: matrices in ``tensor`` parts, layers in ``stages``."""

    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.stages

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return " x ".join(parts) or "whole"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device."""

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self.weights_bytes + self.kv_bytes + self.activations_bytes

    def to_json(self) -> dict[str, int]:
        """Return a JSON object with the parts and their sum."""
        return {**asdict(self), "total_bytes": self.total_bytes}


class Served:
    """A model in a weight format; the sizes of its tensors are computed once for all loads and splits."""

    def __init__(self, model: ModelConfig, form: str) -> None:
        self.model, self.form = model, weight_format(form)
        self._sized = [(weight, tensor_bytes(model, weight, self.form)) for weight in weights(model)]
        self._shares: dict[int, Share] = {}
        self._windows: dict[int | None, list[int]] = {}
        for layer in range(model.num_hidden_layers):
            self._windows.setdefault(model.window(layer), []).append(layer)

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the weights by kind of tensor."""
        sizes = dict[str, int].fromkeys(KINDS, 0)
        for weight, size in self._sized:
            sizes[weight.kind] += size
        return {kind: size for kind, size in sizes.items() if size}

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.bytes_by_kind.values())

    def share(self, tensor: int) -> "Share":
        """Return the weights of one of ``tensor`` parts."""
        if tensor not in self._shares:
            self._shares[tensor] = Share(self.model, self._sized, tensor)
        return self._shares[tensor]

    def kv_bytes(self, load: Load, tensor: int = 1, layers: range | None = None) -> float:
        """Return the bytes of the cache of ``layers`` (None: all) on each of ``tensor`` devices."""
        layers = layers if layers is not None else range(self.model.num_hidden_layers)
        held = 0
        for same in self._windows.values():
            count = bisect_left(same, layers.stop) - bisect_left(same, layers.start)
            held += count * held_tokens(self.model, load, same[0])
        per_token = kv_bytes_per_token(self.model, load.kv) / self.model.kv_heads
        return per_token * kv_heads_per_device(self.model, tensor) * held_rows(load) * held

    def keys(self, load: Load) -> int:
        """Return the cached tokens that a new token attends to, summed over layers."""
        longest = load.context_tokens
        return sum(min(longest, window or longest) * len(same) for window, same in self._windows.items())


class Share:
    """Bytes of the weights on one of ``tensor`` devices, and how many of them a decode step reads."""

    def __init__(self, model: ModelConfig, sized: Iterable[tuple[Weight, int]], tensor: int) -> None:
        layers = [0.0] * model.num_hidden_layers
        self.first = self.last = 0.0
        """Bytes before the first block, and after the last."""
        self.read = self.expert = 0.0
        """Bytes read in every step, and per distinct expert. The embedding is a lookup; a tied one is the head."""
        for weight, whole in sized:
            size = whole * _part(model, weight, tensor)
            if weight.layer is not None:
                layers[weight.layer] += size
            elif weight.name in ("embed", "embedding_norm"):
                self.first += size
            else:
                self.last += size
            if weight.kind == "expert":
                self.expert += size / weight.count
            elif weight.kind != "embedding" or model.tie_word_embeddings:
                self.read += size
        self.before = [0.0, *accumulate(layers)]
        """Bytes of the layers before each layer."""


def device_memory(served: Served, load: Load, split: Split | None = None) -> DeviceMemory:
    """Return the memory of the fullest device of a split (None: one device).

    Tensor parts (Megatron-LM, Shoeybi et al. 2019) split heads, columns and experts' widths; norms and routers are on
    every device, and key/value heads are repeated if there are more parts than heads. Stages have equal numbers of
    layers; a tied embedding is on the first stage and on the last.
    """
    split = split or Split()
    longest = served.model.max_position_embeddings
    if load.context_tokens > longest:
        raise UserError(
            f"context_tokens = {load.context_tokens} is more than the model supports",
            allowed=f"up to max_position_embeddings = {longest}",
            hint="a smaller context, or a model with a larger max_position_embeddings",
        )
    share, layers = served.share(split.tensor), served.model.num_hidden_layers
    last = share.last + (share.first if served.model.tie_word_embeddings and split.stages > 1 else 0)
    activations = step_activation_bytes(served, load, split.tensor)
    fullest: tuple[float, float] = (0.0, 0.0)
    for stage in range(split.stages):
        stage_layers = range(stage * layers // split.stages, (stage + 1) * layers // split.stages)
        size = share.before[stage_layers.stop] - share.before[stage_layers.start]
        size += share.first * (stage == 0) + last * (stage == split.stages - 1)
        fullest = max(fullest, (size, served.kv_bytes(load, split.tensor, stage_layers)), key=sum)
    return DeviceMemory(_up(fullest[0]), _up(fullest[1]), activations)


def held_tokens(model: ModelConfig, load: Load, layer: int) -> int:
    """Return the tokens that the cache of one request holds in a layer.

    Paged: whole blocks; a window of W tokens spans at most ceil((W - 1) / 16) + 1 blocks.
    """
    if load.cache == "smalti":
        capacity = GRAIN_TOKENS
        while capacity < load.context_tokens:
            capacity *= 2
        return min(capacity, -(-model.max_position_embeddings // GRAIN_TOKENS) * GRAIN_TOKENS)
    blocks, window = -(-load.context_tokens // BLOCK_TOKENS), model.window(layer)
    if window is not None:
        blocks = min(blocks, -(-(window - 1) // BLOCK_TOKENS) + 1)
    return blocks * BLOCK_TOKENS


def held_rows(load: Load) -> int:
    """Return the rows of the cache for a batch; in this engine, of a bucket that only grew (``CacheBucket``)."""
    rows = 0
    while load.cache == "smalti" and rows < load.batch:
        rows += 1 + rows // 4
    return max(rows, load.batch)


def step_activation_bytes(served: Served, load: Load, tensor: int = 1) -> int:
    """Estimate the bytes that are alive at one time while a step processes prompts and adds a token to each row.

    For each token of the step: the residual and its normalised copy, and the wider of attention (query, key, value,
    output) and the MLP (gate, up and product; for each expert of the token also input and output), in the format of
    the matmuls (2 bytes; 4 with fp32 weights). For each row its logits and probabilities in fp32.
    """
    model = served.model
    tokens = max(load.batch, min(load.prefill_tokens, load.batch * load.context_tokens))
    width, hidden = model.width_per_head, model.hidden_size
    attention = 2 * (model.num_attention_heads + kv_heads_per_device(model, tensor) * tensor) * width
    inner = 3 if model.gated else 2
    mlp = inner * model.intermediate_size
    whole = 2 * hidden
    if model.moe is not None:
        chosen, shared = model.moe.num_experts_per_tok, model.moe.num_shared_experts
        plain = mlp if model.moe.mlp_only_layers else 0
        mlp = max(plain, (chosen + shared) * inner * model.expert_width)
        whole += 2 * chosen * hidden
    item = 4 if served.form == "fp32" else 2
    return _up(tokens * (whole + max(attention, mlp) / tensor) * item) + load.batch * model.vocab_size * 8


def largest_context(served: Served, load: Load, split: Split, room_bytes: float) -> int:
    """Return the longest context of ``load.batch`` requests that fits, up to the model's maximum; 0: none does."""

    def fits(tokens: int) -> bool:
        return device_memory(served, _changed(load, context_tokens=tokens), split).total_bytes <= room_bytes

    return _largest(fits, served.model.max_position_embeddings)


def largest_batch(served: Served, load: Load, split: Split, room_bytes: float) -> int:
    """Return the most requests of ``load.context_tokens`` each that fit; 0: none does."""

    def fits(batch: int) -> bool:
        return device_memory(served, _changed(load, batch=batch), split).total_bytes <= room_bytes

    return _largest(fits, MAX_BATCH)


def tensor_sizes(model: ModelConfig, most: int) -> list[int]:
    """Return the tensor parallel sizes up to ``most``: divisors of heads, widths and experts' widths."""
    widths = {model.intermediate_size, model.expert_width}
    return [
        size
        for size in range(1, most + 1)
        if model.num_attention_heads % size == 0
        and (model.kv_heads % size == 0 or size % model.kv_heads == 0)
        and all(width % size == 0 for width in widths)
    ]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _changed(load: Load, **changes: Any) -> Load:
    return Load(**{**asdict(load), **changes})


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` for which ``fits`` is true, by bisection."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def kv_heads_per_device(model: ModelConfig, tensor: int) -> int:
    """Return the key/value heads on one of ``tensor`` devices."""
    return max(1, model.kv_heads // tensor)


def _part(model: ModelConfig, weight: Weight, tensor: int) -> float:
    """Return the share of a weight on one of ``tensor`` devices."""
    if weight.kind in ("norm", "router") or weight.name in ("o_proj.bias", "down_proj.bias"):
        return 1.0
    if weight.name.startswith(("k_proj", "v_proj")):
        return kv_heads_per_device(model, tensor) / model.kv_heads
    return 1 / tensor


def _up(size: float) -> int:
    return -int(-size // 1)
