"""The ``train:`` section: optimizer, schedule, precision, loss, cadences, and where the ranks run."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smalti.config.durations import LengthConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.schema import (
    Cadence,
    Config,
    Count,
    Duration,
    NotAllowed,
    Real,
    Whole,
    placement,
    split_duration,
)


class ScheduleConfig(Config):
    """The learning rate over the run: linear up, a plateau, then down."""

    name: Literal["wsd", "cosine", "inverse_sqrt"] = "wsd"
    """``wsd``: flat until the decay; ``cosine``: one cosine from the warmup to the end; ``inverse_sqrt``: as
    1 / sqrt(step) from the warmup on, until the decay."""
    warmup: Duration = "0.02run"
    """Length of the linear rise; with the decay at most the whole run."""
    start_frac: Real = Field(0.0, ge=0, lt=1)
    """What the rise starts from, as a share of the peak; above 0 for re-warming (continued pretraining)."""
    decay: Duration = "0.2run"
    """Length of the final fall; for ``cosine`` all that the warmup leaves."""
    shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Form of the fall; ``sqrt`` is 1 - sqrt(x)."""
    final_frac: Real = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak (``inverse_sqrt``: of what it has come down to by then)."""

    @property
    def given_decay(self) -> str:
        """The decay, but for a cosine, which takes whatever the warmup leaves: none."""
        return "0step" if self.name == "cosine" else self.decay

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        idle: tuple[str, ...] = ()
        why = ""
        if self.name == "cosine":
            idle, why = ("decay", "shape"), "with schedule 'cosine', which falls from the warmup on"
        elif split_duration(self.decay)[0] == 0:
            idle, why = ("shape", "final_frac"), f"without a fall: schedule.decay={self.decay}"
        for name in idle:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"schedule.{name} has no effect {why}")
        rises = split_duration(self.warmup)[0] > 0
        if self.start_frac and not rises:
            raise ValueError(f"schedule.start_frac={self.start_frac} has no effect without a warmup")
        if self.name == "inverse_sqrt" and not rises:
            raise ValueError("schedule 'inverse_sqrt' needs a warmup: its length is the scale of the fall")
        return self


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
    chunk_bytes: Annotated[Whole, Field(ge=1)] | Literal["auto"] = placement("auto")
    """Memory for logits, and what is made of them, that exist at one time; auto: 4 GiB on a GPU, where small tiles are
    slow and large vocabularies would be computed twice, 256 MiB on a CPU."""

    def tile_bytes(self, device: str) -> int:
        """``chunk_bytes`` on a device of that type."""
        if self.chunk_bytes != "auto":
            return self.chunk_bytes
        return 2**28 if device == "cpu" else 2**32


class CheckpointConfig(Config):
    """When and how many checkpoints are kept."""

    every: Cadence = placement("0.25run")
    """How often; a last one is always written."""
    keep: Whole = placement(2, ge=1)
    """Newest complete checkpoints that stay."""


class TrainConfig(LengthConfig):
    """How the model learns."""

    microbatch_tokens: Count | Literal["auto"] = placement("auto")
    """Tokens in one forward pass on one rank; auto: the most of the rank's share that the planner finds to fit its
    memory, on a CPU at most 16,384 tokens."""
    microbatch_trial: bool | Literal["auto"] = placement("auto")
    """Try the microbatch that was chosen, forward and backward, before the first step; auto: on CUDA."""
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
        if self.microbatch_trial is True and self.microbatch_tokens != "auto":
            raise NotAllowed(
                f"microbatch_trial=true has no effect with microbatch_tokens={self.microbatch_tokens}",
                allowed="a trial of what 'auto' chooses",
                hint="train.microbatch_tokens=auto, or take microbatch_trial out",
            )
        return self
