"""``Layout``: the number of ranks along each axis of parallelism.

Memory, network and time are computed for a layout. It is consistent with its number of ranks; whether it fits a model
or a device is checked elsewhere, and ``smalti/distributed`` builds the mesh.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from smalti.base.errors import UserError
from smalti.config.run import JobConfig

AXES = ("replicate", "shard", "sequence", "tensor", "pipeline", "expert")


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. ``world_size`` is the product of all but ``expert``, which subdivides the others."""

    replicate: int = 1
    """Copies of the sharded model (the outer axis of HSDP)."""
    shard: int = 1
    """Ranks that share weights, gradients and moments (FSDP2)."""
    sequence: int = 1
    """Ranks that share each row of tokens (Ulysses or ring); weights are sharded over them too."""
    tensor: int = 1
    """Tensor parallel ranks."""
    pipeline: int = 1
    """Pipeline stages: ranks that share the layers."""
    expert: int = 1
    """Ranks that share the experts; divides shard x sequence."""

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise UserError(f"axis {axis} = {size} is not valid", allowed="a whole number from 1")
        if self.sequence % self.expert and self.expert % self.sequence:
            raise UserError(
                f"axes expert = {self.expert} and sequence = {self.sequence} overlap: neither divides the other",
                allowed="one that is a multiple of the other",
            )
        if (self.shard * self.sequence) % self.expert:
            raise UserError(
                f"axis expert = {self.expert} does not divide shard x sequence = {self.shard} x {self.sequence}",
                allowed="a divisor of it: experts are spread over the ranks that share the weights",
            )

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.replicate * self.shard * self.sequence * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Ranks that share dense weights, gradients and moments, apart from tensor and pipeline."""
        return self.shard * self.sequence

    @property
    def axes_in_use(self) -> int:
        """Number of axes larger than 1."""
        return sum(size > 1 for size in asdict(self).values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items() if size > 1) or "one rank"


def layout_of(config: JobConfig, ranks: int | None = None) -> Layout:
    """Return the layout that ``smalti train`` gives the config; ``ranks`` replaces the config's.

    Of axes that are still ``auto``, shard takes the remaining ranks, and others are 1. UserError if the axes do not
    multiply to the ranks.
    """
    parallel = config.train.parallel
    wanted = ranks or parallel.ranks
    values = {axis: getattr(parallel, axis) for axis in AXES}
    sizes = {axis: 1 if size == "auto" else size for axis, size in values.items()}
    if values["shard"] == "auto":
        sizes["shard"] = max(1, wanted // _product({**sizes, "shard": 1}))
    if _product(sizes) != wanted:
        raise _uneven(values, sizes, wanted)
    return Layout(**sizes)


def _product(sizes: dict[str, int]) -> int:
    return math.prod(size for axis, size in sizes.items() if axis != "expert")


def _uneven(values: dict[str, Any], sizes: dict[str, int], ranks: int) -> UserError:
    """Return the error for axes that do not multiply to the ranks, with the nearest change of one axis."""
    named = {axis: size for axis, size in values.items() if axis != "expert" and size not in (1, "auto")}
    axis = max(named, key=lambda candidate: (candidate != "shard", named[candidate]), default="shard")
    others = _product({**sizes, axis: 1, **({} if "shard" in named else {"shard": 1})})
    fits = [n for n in range(1, ranks + 1) if ranks % (others * n) == 0]
    fits = fits[-1:] if "shard" in named else fits
    near = min(fits, key=lambda n: abs(n - sizes[axis]), default=None)
    hint = f"train.parallel.ranks={_product(sizes)}" if near is None else f"train.parallel.{axis}={near}"
    if len(named) == 1 and axis != "shard":
        text = f"train.parallel.{axis}={named[axis]} does not divide the {ranks} ranks"
        return UserError(text, allowed=f"a divisor of {ranks}: {', '.join(map(str, fits))}", hint=hint)
    axes_text = " x ".join(f"{name} {size}" for name, size in named.items()) or f"shard {sizes['shard']}"
    return UserError(
        f"train.parallel: {axes_text} {'does' if len(named) < 2 else 'do'} not multiply to {ranks} ranks",
        allowed=f"replicate x shard x sequence x tensor x pipeline = {ranks}",
        hint=hint,
    )
