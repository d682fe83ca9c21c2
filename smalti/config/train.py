"""The ``train:`` section: optimizer, schedule, precision, loss, cadences, and where the ranks run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.durations import LengthConfig
from smalti.config.schema import BelowOne, Cadence, Config, Count, Duration, Real, WallTime, Whole, placement


class OptimizerConfig(Config):
    """AdamW with decoupled weight decay; norms, biases and embeddings are exempt from decay by rule."""

    name: Literal["adamw"] = "adamw"
    """The update rule."""
    lr: Real = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the two moments, each below 1."""
    eps: Real = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: Real = Field(0.1, ge=0)
    """Decoupled decay of matrices, times the learning rate."""
    clip_norm: Real = Field(1.0, gt=0)
    """Upper bound of the global gradient norm."""


class ScheduleConfig(Config):
    """Warmup, stable, decay (WSD): linear up, flat, then down."""

    warmup: Duration = "0.02run"
    """Length of the linear rise from 0; with the decay at most the whole run."""
    decay: Duration = "0.2run"
    """Length of the final fall."""
    shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Form of the fall; ``sqrt`` is 1 - sqrt(x)."""
    final_frac: Real = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class PrecisionConfig(Config):
    """Number formats, each said outright."""

    master: Literal["fp32"] = "fp32"
    """Weights that the optimizer updates."""
    compute: Literal["fp32", "bf16"] = "bf16"
    """Matmuls and activations."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Gradient reduction over ranks."""
    moments: Literal["fp32"] = "fp32"
    """Optimizer state."""


class LossConfig(Config):
    """Next-token cross-entropy."""

    z_loss_coef: Real = Field(0.0, ge=0)
    """Weight of the squared log-partition of the output (0 switches it off)."""
    chunk_tokens: Whole = placement(512, ge=1)
    """Tokens whose logits exist at one time."""


class ParallelConfig(Config):
    """Where the run is carried out; none of it changes which tokens are learned, in which order."""

    ranks: Whole = placement(1, ge=1)
    """Processes on this machine when ``smalti train`` starts them itself."""
    replicate: Whole = placement(1, ge=1)
    """Size of the replicate axis (HSDP); the rest of the ranks shard the weights."""
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


class CheckpointConfig(Config):
    """When and how many checkpoints are kept."""

    every: Cadence = placement("0.25run")
    """How often; a last one is always written."""
    keep: Whole = placement(2, ge=1)
    """Newest complete checkpoints that stay."""


class TrainConfig(LengthConfig):
    """How the model learns."""

    microbatch_tokens: Count | Literal["auto"] = placement("auto")
    """Tokens in one forward pass on one rank; auto: the rank's whole share, at most 16,384 tokens."""
    optimizer: OptimizerConfig
    """The update."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over time."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks, devices, compilation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    log_every: Cadence = placement("1step")
    """How often metrics are written."""
    eval_every: Cadence = placement("0.1run")
    """How often held-out loss is measured in the loop; the end always is."""
    eval_tokens: Whole = placement(65_536, ge=1)
    """Held-out tokens per source in the loop."""

    @model_validator(mode="after")
    def _microbatch_fits_the_batch(self) -> Self:
        largest = max(self.global_batch_tokens, *(part.global_batch_tokens for part in self.batch_ramp), 0)
        if isinstance(self.microbatch_tokens, int) and self.microbatch_tokens > largest:
            most = "the largest batch" if self.batch_ramp else "global_batch_tokens"
            raise ValueError(f"microbatch_tokens={self.microbatch_tokens} is more than {most}={largest}")
        return self
