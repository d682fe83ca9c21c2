"""The section ``adapter``: low-rank matrices that are trained beside the frozen weights of ``init_from``."""

import math
from typing import Literal

from pydantic import Field, field_validator

from smalti.config.model import ModelConfig
from smalti.config.schema import Config, NotAllowed, Real, Whole

Quantization = Literal["nf4", "nf4_double", "int8"]
BLOCK = 64
"""Numbers of a quantised weight that share a scale."""
GROUP = 256
"""Scales that ``nf4_double`` quantises together."""


class AdapterConfig(Config):
    """LoRA (Hu et al. 2021, arXiv:2106.09685): W + scale B A, with B [out, rank] and A [rank, in] trained, W frozen."""

    rank: Whole = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: Real = Field(32.0, gt=0)
    """The scale of B A is alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps the size of updates at large ranks (arXiv:2312.03732)."""
    targets: tuple[str, ...] = ("attention", "mlp")
    """The matrices that get an adapter, by a part of their name in a layer: ``attention``, ``mlp`` (with experts),
    ``experts``, ``q_proj``, ``mlp.down_proj``."""
    layers: tuple[Whole, Whole] | None = None
    """First and last layer with adapters, counted from 0; absent: all layers."""
    quantize: Quantization | None = None
    """Keep the frozen matrices of all layers in ``nf4`` (QLoRA, arXiv:2305.14314; 4.5 bits a weight), ``nf4_double``
    (its scales in 8 bits too; 4.13 bits) or ``int8`` (8.5 bits); absent: in ``train.precision.compute``."""
    init_from: str | None = None
    """Folder of an adapter in PEFT's format to start from, with the same rank, scale and targets; absent: B is 0."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def paths(self, model: ModelConfig) -> dict[int, list[str]]:
        """Return layer -> the names in it of the matrices that get an adapter."""
        first, last = self.layers or (0, model.num_hidden_layers - 1)
        names = {layer: matrices(model, layer) for layer in range(first, last + 1)}
        return {
            layer: [name for name in of if any(_names(t, name) for t in self.targets)] for layer, of in names.items()
        }

    def check(self, model: ModelConfig) -> None:
        """Raise NotAllowed for layers that the model does not have, and for targets that name none of its matrices."""
        count = model.num_hidden_layers
        first, last = self.layers or (0, count - 1)
        if not 0 <= first <= last < count:
            raise NotAllowed(
                f"adapter.layers=[{first},{last}]: the model has {count} layers",
                allowed=f"the first and the last layer, from 0 to {count - 1}",
                hint=f"adapter.layers=[{min(max(first, 0), count - 1)},{count - 1}]",
            )
        if self.rank > model.hidden_size:
            raise NotAllowed(
                f"adapter.rank={self.rank}: the matrices have at most rank {model.hidden_size} (hidden_size), so an "
                "adapter would hold more numbers than they do",
                allowed=f"1 to {model.hidden_size}",
                hint="adapter.rank=16, or full tuning: leave the section adapter out",
            )
        there = list(dict.fromkeys(name for layer in range(first, last + 1) for name in matrices(model, layer)))
        for target in self.targets:
            if not any(_names(target, name) for name in there):
                raise NotAllowed(
                    f"adapter.targets: '{target}' is no matrix of layers {first} to {last}",
                    allowed=", ".join(sorted({part for name in there for part in (*name.split("."), name)})),
                    hint="adapter.targets=[attention,mlp]",
                )

    @field_validator("targets")
    @classmethod
    def _some_target(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise NotAllowed("adapter.targets is empty", allowed="one or more", hint="adapter.targets=[attention,mlp]")
        return targets


def matrices(model: ModelConfig, layer: int) -> list[str]:
    """Return the names of the matrices of a layer that can get an adapter: all but the router."""
    parts = ("gate_proj", "up_proj", "down_proj") if model.gated else ("up_proj", "down_proj")
    names = [f"attention.{part}_proj" for part in "qkvo"]
    if model.moe is None or not model.has_experts(layer):
        return names + [f"mlp.{part}" for part in parts]
    shared = parts if model.moe.num_shared_experts else ()
    return names + [f"mlp.shared_experts.{part}" for part in shared] + [f"mlp.experts.{part}" for part in parts]


def matrix_names(model: ModelConfig) -> list[str]:
    """Return the names of the weights of all matrices that can have an adapter; ``quantize`` stores them in fewer
    bits."""
    names = [f"blocks.{i}.{name}" for i in range(model.num_hidden_layers) for name in matrices(model, i)]
    return [name if ".experts." in name else f"{name}.weight" for name in names]


def _names(target: str, name: str) -> bool:
    """Return whether ``target`` is a part of a dotted name, of whole words."""
    return f".{target}." in f".{name}."
