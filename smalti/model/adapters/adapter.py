"""An adapter outside of a model: its matrices by the name of the weight they change, and the weights with it merged.

Shapes: I inputs, O outputs, r rank, E experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smalti.base.errors import DataError
from smalti.model.blocks.embed import SCORES


@dataclass(frozen=True)
class Adapter:
    """W + scale B A for some weights of a decoder; with experts, A and B have one more dim in front."""

    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    """Name of the weight in the ``state_dict`` -> A [r, I] and B [O, r]. Ranks may differ."""
    whole: dict[str, Tensor] = field(default_factory=dict)
    """Weights that are trained whole, by name: the score of a reward model."""

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], scale: float) -> "Adapter":
        """Collect the adapters of a model's tensors; ``weights``: those of the plain decoder, by name."""
        names = {weight: names_of(weight) for weight in weights}
        pairs = {weight: (tensors[a], tensors[b]) for weight, (a, b) in names.items() if a in tensors}
        return cls(scale, pairs, {name: tensors[name] for name in (SCORES,) if name in tensors})

    def to(self, dtype: torch.dtype) -> "Adapter":
        """Return the adapter in another format."""
        pairs = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in self.pairs.items()}
        return Adapter(self.scale, pairs, {name: weight.to(dtype) for name, weight in self.whole.items()})

    def check(self, weights: Mapping[str, Tensor], what: str) -> None:
        """Raise DataError where a matrix does not fit the weight that it changes."""
        for name, (a, b) in self.pairs.items():
            shape = tuple(change_shape(name, weights[name]))
            rank = a.shape[-2]
            if a.shape != (*shape[:-2], rank, shape[-1]) or b.shape != (*shape[:-1], rank):
                raise DataError(
                    f"{what}: the adapter of '{name}' has A {list(a.shape)} and B {list(b.shape)}; "
                    f"a matrix {list(shape)} needs [rank, {shape[-1]}] and [{shape[-2]}, rank]",
                    hint="it belongs to another base model",
                )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its change added in float32 (or float64), in the weight's dtype."""
        if name not in self.pairs:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        a, b = (tensor.to(wide) for tensor in self.pairs[name])
        change = self.scale * (b @ a)
        return (weight.to(wide) + (change.mT if is_transposed(name) else change)).to(weight.dtype)


class Merged(Mapping[str, Tensor]):
    """The weights of a model with an adapter merged, each computed on access; a reward model has no output head."""

    def __init__(self, weights: Mapping[str, Tensor], adapter: Adapter) -> None:
        self._weights, self._adapter = weights, adapter
        names = dict.fromkeys([*weights, *adapter.whole])
        self._names = [name for name in names if SCORES not in adapter.whole or name != "lm_head.weight"]

    def __getitem__(self, name: str) -> Tensor:
        whole = self._adapter.whole.get(name)
        return self._adapter.merge(name, self._weights[name]) if whole is None else whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def names_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B in a model with adapters, from that of the weight."""
    stem = f"{weight.removesuffix('.weight')}." if weight.endswith(".weight") else f"{weight}_"
    return f"{stem}lora_A", f"{stem}lora_B"


def is_transposed(weight: str) -> bool:
    """Return whether a weight is stored [E, I, O]: the experts' down projection."""
    return weight.endswith("experts.down_proj")


def change_shape(name: str, weight: Tensor) -> torch.Size:
    """Return the shape of B A for a weight: [O, I], for experts [E, O, I]."""
    return weight.mT.shape if is_transposed(name) else weight.shape
