"""Memory of a run that trains adapters: frozen weights as they are kept, and the adapters' own parameters.

A frozen matrix takes ``compute_bytes`` a number, quantised 1/2 or 1 byte and a scale of 4 bytes for a block of 64
(``smalti/model/adapters/quantized.py``). Its gradient is never computed.
"""

from dataclasses import dataclass

from smalti.config.adapter import BLOCK, GROUP, AdapterConfig, matrices
from smalti.config.model import ModelConfig
from smalti.cost.memory.tape import MicrobatchShape
from smalti.cost.units import part_of
from smalti.cost.weights import Weight, weights

_STORED_BYTES = {"nf4": 0.5 + 4 / BLOCK, "nf4_double": 0.5 + (1 + 8 / GROUP) / BLOCK, "int8": 1 + 4 / BLOCK}
_INDEX_BYTES = {"nf4": 2, "nf4_double": 2, "int8": 4}
_CHUNK = 1 << 21
"""Numbers that are dequantised at a time."""


@dataclass(frozen=True)
class Frozen:
    """The weights of a layer beside adapters, on the ranks that share weights, for one rank of the axis ``tensor``."""

    frozen_bytes: float
    """As they are kept, without the router."""
    adapters: float
    """Elements of A and B."""
    gathered_frozen_bytes: float
    """Those that a rank gathers: of the experts only its own."""
    gathered_adapters: float


def layer_of(
    model: ModelConfig,
    adapter: AdapterConfig,
    layer: int,
    compute_bytes: int,
    shards: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> Frozen:
    """Return the sizes of a layer; A and B are padded to ``shards`` ranks."""
    every, chosen = matrices(model, layer), adapter.paths(model).get(layer, [])
    frozen, trained = {1: 0.0, expert: 0.0}, {1: 0.0, expert: 0.0}
    for weight in weights(model):
        if weight.layer != layer or weight.kind == "router":
            continue
        path = _path(weight, every)
        ranks = expert if weight.kind == "expert" else 1
        split = 1 if part_of(weight, model.qk_norm).tensor == "none" else tensor
        frozen[ranks] += weight.params / split * (bytes_of(adapter, compute_bytes) if path else compute_bytes)
        if path in chosen:
            rank = -(-adapter.rank // shards) * shards if weight.count == 1 else adapter.rank
            by_inputs = weight.name in ("o_proj", "down_proj")  # then A is split over ``tensor``, else B
            a, b = rank * weight.columns, adapter.rank * weight.rows
            trained[ranks] += weight.count * (a / tensor + b if by_inputs else a + b / tensor)
    sums = (sum(sizes.values()) for sizes in (frozen, trained))
    gathered = (sum(size / ranks for ranks, size in sizes.items()) for sizes in (frozen, trained))
    return Frozen(*sums, *gathered)


def bytes_of(adapter: AdapterConfig, compute_bytes: int) -> float:
    """Return the bytes of a number of a frozen matrix."""
    return compute_bytes if adapter.quantize is None else _STORED_BYTES[adapter.quantize]


def dequantized_bytes(model: ModelConfig, adapter: AdapterConfig, layer: int, shape: MicrobatchShape) -> float:
    """Return the bytes of the largest matrix of a layer while it is dequantised, 0 if none is quantised."""
    if adapter.quantize is None:
        return 0.0
    every = matrices(model, layer)
    numbers = max(
        w.params / shape.tensor / (shape.expert if w.kind == "expert" else 1)
        for w in weights(model)
        if w.layer == layer and _path(w, every)
    )
    return numbers * shape.compute_bytes + min(numbers, _CHUNK) * (4 + _INDEX_BYTES[adapter.quantize])


def low_rank_bytes(model: ModelConfig, adapter: AdapterConfig, layer: int, shape: MicrobatchShape) -> float:
    """Return the bytes of the products A x of a layer, which are saved for backward."""
    names = adapter.paths(model).get(layer, [])
    per_token = model.moe.num_experts_per_tok if model.moe else 1
    rows = sum(per_token if name.startswith("mlp.experts.") else 1 for name in names)
    return shape.tokens * adapter.rank * rows * shape.compute_bytes


def total(model: ModelConfig, adapter: AdapterConfig) -> int:
    """Return the number of parameters that a run with this adapter trains."""
    adapters = sum(layer_of(model, adapter, layer, 4).adapters for layer in range(model.num_hidden_layers))
    return round(adapters) + model.hidden_size * (model.num_labels or 0)  # the score of a reward model too


def _path(weight: Weight, every: list[str]) -> str | None:
    """Return the name in its layer of a matrix that can have an adapter."""
    folder = {"attention": "attention.", "expert": "mlp.experts.", "mlp": "mlp."}.get(weight.kind)
    if folder is None:
        return None
    name = folder + weight.name
    return name if name in every else f"mlp.shared_experts.{weight.name}"
