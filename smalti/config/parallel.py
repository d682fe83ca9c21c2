"""The section ``train.parallel``: ranks, the axes of parallelism that they are laid out along, devices, compilation."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.config.schema import Config, Count, NotAllowed, WallTime, Whole, placement

Axis = Count | Literal["auto"]


class ParallelConfig(Config):
    """Where the run is carried out; none of it changes which tokens are learned, in which order.

    ranks = replicate x shard x sequence x tensor x pipeline; ``expert`` is folded out of shard x sequence.
    """

    ranks: Whole = placement(1, ge=1)
    """Processes, one for each device: of this machine where ``smalti train`` starts them, else of the whole job."""
    replicate: Axis = placement(1)
    """Copies of the sharded model (HSDP)."""
    shard: Axis = placement("auto")
    """Ranks that share weights, gradients and moments (FSDP); auto: all that the other axes leave."""
    tensor: Axis = placement(1)
    """Ranks that share each matrix."""
    expert: Axis = placement(1)
    """Ranks that share the experts of a layer; they are ranks of shard x sequence."""
    sequence: Axis = placement(1)
    """Ranks that share each row of tokens, for long ones."""
    pipeline: Axis = placement(1)
    """Pipeline stages: ranks that share the layers."""
    dispatch: Literal["exact", "static"] = placement("exact")
    """How tokens travel to experts on other ranks: as many as there are, or in buffers that hold the worst case."""
    context: Literal["ulysses", "ring"] = placement("ulysses")
    """What ranks of a row exchange: heads for tokens, or keys and values in a ring."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = placement("1f1b")
    """The order of microbatches in a pipeline."""
    threads: Count | Literal["auto"] = placement("auto")
    """CPU threads for each rank; auto: cores / ranks."""
    device: Literal["auto", "cpu", "cuda"] = placement("auto")
    """auto takes CUDA where it is."""
    compile: bool | Literal["auto"] = placement("auto")
    """torch.compile of each block; auto: on with CUDA, off without."""
    activation_checkpointing: Literal["none", "full"] = placement("none")
    """``full`` recomputes each block in the backward pass."""
    timeout: WallTime = placement("10min")
    """A collective that takes longer ends the attempt."""
    join_timeout: WallTime = placement("60s")
    """How long ranks wait for each other before they begin; those that are missing then are named."""

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Axes beside shard that are ``auto``: those that a planner can choose."""
        names = ("replicate", "tensor", "expert", "sequence", "pipeline")
        return tuple(name for name in names if getattr(self, name) == "auto")

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for option, axis in (("dispatch", "expert"), ("context", "sequence"), ("pipeline_schedule", "pipeline")):
            value, default = getattr(self, option), type(self).model_fields[option].default
            if value != default and getattr(self, axis) == 1:
                raise NotAllowed(
                    f"train.parallel.{option}={value} has no effect with train.parallel.{axis}=1",
                    allowed=f"{option} beside {axis} = 2 or more, or auto",
                    hint=f"take train.parallel.{option} out, or give train.parallel.{axis}",
                )
        return self
