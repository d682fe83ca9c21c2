"""How ranks are laid out along the axes of parallelism, as numbers: what memory, network and time are reckoned for.

Promises: a layout that exists is possible for its number of ranks. Whether it fits a model or a device is not said
here; building the mesh is ``smalti/dist``'s.
"""

from dataclasses import asdict, dataclass

from smalti.base.errors import UserError
from smalti.config.run import RunConfig


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. ``world_size`` is the product of all but ``expert``, which is folded out of the others."""

    replicate: int = 1
    """Copies of the sharded model (the outer axis of HSDP)."""
    shard: int = 1
    """Ranks that share weights, gradients and moments (FSDP2)."""
    sequence: int = 1
    """Ranks that share each row of tokens (Ulysses or ring); weights are sharded over them too."""
    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Pipeline stages: ranks that share the layers."""
    expert: int = 1
    """Ranks that share the experts; divides shard x sequence."""

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise UserError(f"axis {axis} = {size} cannot be", allowed="a whole number from 1")
        if (self.shard * self.sequence) % self.expert:
            raise UserError(
                f"axis expert = {self.expert} does not divide shard x sequence = {self.shard} x {self.sequence}",
                allowed="a divisor of it: experts are spread over the ranks that share the weights",
            )

    @property
    def world_size(self) -> int:
        """Ranks of all."""
        return self.replicate * self.shard * self.sequence * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Ranks that dense weights, their gradients and moments are spread over, beside tensor and pipeline."""
        return self.shard * self.sequence

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items() if size > 1) or "one rank"


def layout_of(config: RunConfig, ranks: int | None = None) -> Layout:
    """The layout that ``smalti train`` gives the config; ``ranks``: in place of the config's own."""
    parallel = config.train.parallel
    return Layout(replicate=parallel.replicate, shard=max(1, (ranks or parallel.ranks) // parallel.replicate))
