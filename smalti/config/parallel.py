"""The section ``train.parallel``: ranks, axes of parallelism, devices, compilation."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.config.schema import Config, Count, NotAllowed, WallTime, Whole, placement

Axis = Count | Literal["auto"]
DispatchMode = Literal["exact", "static"]
Context = Literal["ulysses", "ring"]
PipelineSchedule = Literal["1f1b", "interleaved", "zero_bubble"]


class ParallelConfig(Config):
    """Placement of the run; nothing here changes which tokens are trained on, or their order.

    ranks = replicate x shard x sequence x tensor x pipeline; ``expert`` divides shard x sequence.
    """

    ranks: Whole = placement(1, ge=1)
    """Number of processes, one for each device: on this machine if ``smalti train`` starts them, else in the whole
    job."""
    replicate: Axis = placement(1)
    """Number of replicas of the sharded model (HSDP)."""
    shard: Axis = placement("auto")
    """Ranks over which weights, gradients and moments are sharded (FSDP); auto: all that the other axes leave."""
    tensor: Axis = placement(1)
    """Tensor parallel size: ranks over which each matrix is split."""
    expert: Axis = placement(1)
    """Expert parallel size: ranks over which a layer's experts are distributed, taken from shard x sequence."""
    sequence: Axis = placement(1)
    """Sequence parallel size: ranks over which each sequence is split, for long contexts."""
    pipeline: Axis = placement(1)
    """Pipeline parallel size: ranks over which the layers are split."""
    dispatch: DispatchMode = placement("exact")
    """How tokens are sent to experts on other ranks: in their exact number, or in worst-case buffers."""
    context: Context = placement("ulysses")
    """Algorithm of sequence parallelism: all-to-all from tokens to heads, or keys and values in a ring."""
    pipeline_schedule: PipelineSchedule = placement("1f1b")
    """Schedule of the microbatches in the pipeline."""
    threads: Count | Literal["auto"] = placement("auto")
    """CPU threads of each rank; auto: cores / ranks."""
    device: Literal["auto", "cpu", "cuda"] = placement("auto")
    """Device of the ranks; auto: CUDA where available."""
    compile: bool | Literal["auto"] = placement("auto")
    """Compile each block with torch.compile; auto: on CUDA only."""
    activation_checkpointing: Literal["none", "full"] = placement("none")
    """``full``: recompute each block in the backward pass, which saves memory."""
    timeout: WallTime = placement("10min")
    """Time limit of a collective; a longer one ends the attempt."""
    join_timeout: WallTime = placement("60s")
    """How long ranks wait for each other at the start; the error names the missing ones."""

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Axes other than shard that are ``auto``, which the planner chooses."""
        names = ("replicate", "tensor", "expert", "sequence", "pipeline")
        return tuple(name for name in names if getattr(self, name) == "auto")

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for option, axis in (("dispatch", "expert"), ("context", "sequence"), ("pipeline_schedule", "pipeline")):
            value = getattr(self, option)
            default = type(self).model_fields[option].default
            if value != default and getattr(self, axis) == 1:
                raise NotAllowed(
                    f"train.parallel.{option}={value} has no effect with train.parallel.{axis}=1",
                    allowed=f"{option} with {axis} = 2 or more, or auto",
                    hint=f"remove train.parallel.{option}, or set train.parallel.{axis}",
                )
        return self
