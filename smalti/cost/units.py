"""The parameters that a sharded model gathers together: the root, each block, each router.

They are those of ``smalti.model.decoder.Decoder``, in the units of ``smalti.distributed.parallel.fsdp.shard`` (a test
compares both). ``Unit.elements`` adds the padding of a layout.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from smalti.config.model import ModelConfig
from smalti.cost.params import count
from smalti.cost.weights import Weight, weights

Name = Literal["root", "block", "expert block", "router"]

KEEP_GATHERED_BYTES = 1 << 30
"""A model with no more bytes of gathered weights keeps them between forward and backward; a test holds it equal to
``distributed/parallel/fsdp.py``."""


FORMAT_BYTES = {"fp32": 4, "bf16": 2}
"""Name of a number format -> bytes of a number."""

_ROWS_SHARED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head")
_WIDTH_SHARED = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A parameter of a unit. FSDP2 shards its rows (dim 0), or another dim of experts."""

    rows: int
    """Size of dim 0."""
    width: int
    """Elements of a row."""
    inner: tuple[int, ...]
    """Other dims, of experts, that may be sharded instead if the ranks do not divide the rows."""
    tensor: Literal["rows", "width", "none"]
    """The dim that a tensor axis splits; ``none``: every rank of that axis has the whole parameter."""

    @property
    def is_expert(self) -> bool:
        """True for [experts, ...]: an expert axis splits its rows, a tensor axis its width."""
        return bool(self.inner)


@dataclass(frozen=True)
class Unit:
    """Parameters that one collective gathers, and whose gradients one collective reduces."""

    name: Name
    """``expert block``: a block with experts, without its router."""
    count: int
    """Number of such units in the model."""
    parts: tuple[Part, ...]
    """Its parameters."""

    @property
    def full_precision(self) -> bool:
        """True if it is gathered and reduced in fp32, and stays gathered between forward and backward."""
        return self.name == "router"

    def elements(self, shards: int, *, tensor: int = 1, experts: bool | None = None) -> int:
        """Return the elements of the gathered buffer over ``shards`` ranks.

        Rows are padded to a multiple of the ranks, unless an inner dim is one. experts: only the experts' weights, or
        only the others; None: all.
        """
        return sum(_padded(part, shards, tensor) for part in self.parts if experts is None or part.is_expert == experts)


@lru_cache(maxsize=32)
def units(model: ModelConfig) -> tuple[Unit, ...]:
    """Return the root, then the kinds of block that the model has, then its routers."""
    layers = range(model.num_hidden_layers)
    named = weights(model)
    result = [Unit("root", 1, _parts([w for w in named if w.layer is None], model.qk_norm))]
    for with_experts in (False, True):
        alike = [layer for layer in layers if model.has_experts(layer) == with_experts]
        if not alike:
            continue
        block = [weight for weight in named if weight.layer == alike[0]]
        rest = _parts([w for w in block if w.kind != "router"], model.qk_norm)
        result.append(Unit("expert block" if with_experts else "block", len(alike), rest))
        if with_experts:
            result.append(Unit("router", len(alike), _parts([w for w in block if w.kind == "router"], model.qk_norm)))
    return tuple(result)


def keeps_gathered(model: ModelConfig, compute_bytes: int, *, stage: bool = False) -> bool:
    """Return True if weights stay gathered between forward and backward: of a small model, or a pipeline ``stage``."""
    return stage or count(model).total * compute_bytes <= KEEP_GATHERED_BYTES  # the sizes before sharding


def _parts(named: Iterable[Weight], qk_norm: str | None) -> tuple[Part, ...]:
    return tuple(part_of(weight, qk_norm) for weight in named)


def part_of(weight: Weight, qk_norm: str | None) -> Part:
    """Return how a tensor is sharded."""
    if weight.kind == "expert":
        inner = (weight.columns, weight.rows) if weight.name == "down_proj" else (weight.rows, weight.columns)
        return Part(weight.count, weight.rows * weight.columns, inner, "width")  # all are stored [E, F, D]
    matrix = weight.name.removesuffix(".bias")
    tensor: Literal["rows", "width", "none"] = "none"
    if matrix in _ROWS_SHARED:
        tensor = "rows"
    elif matrix in _WIDTH_SHARED and weight.kind != "bias":
        tensor = "width"
    elif matrix in ("q_norm", "k_norm") and qk_norm == "full":  # one weight for each column of what is projected
        tensor = "rows"
    if weight.kind in ("norm", "bias"):  # vectors: each element is a row
        return Part(weight.columns, 1, (), tensor)
    return Part(weight.rows, weight.columns, (), tensor)


def _padded(part: Part, shards: int, tensor: int) -> int:
    rows, width = part.rows, part.width
    if part.tensor == "rows":
        rows = -(-rows // tensor)
    elif part.tensor == "width":
        width = -(-width // tensor)
    if part.inner and any(size % shards == 0 for size in (part.inner[0] // tensor, *part.inner[1:])):
        return rows * width
    return -(-rows // shards) * shards * width
