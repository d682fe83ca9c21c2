"""The ``train:`` section: optimizer, schedule, precision, loss, cadences, parallelism."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smalti.config.durations import LengthConfig
from smalti.config.ema import EmaConfig
from smalti.config.health import HealthConfig
from smalti.config.nodes import NodesConfig
from smalti.config.optimizer import OPTIMIZERS, OptimizerConfig
from smalti.config.parallel import ParallelConfig
from smalti.config.restart import RestartConfig
from smalti.config.schema import (
    Cadence,
    Config,
    Count,
    Duration,
    Interval,
    NotAllowed,
    Real,
    Whole,
    placement,
    split_duration,
)


class ScheduleConfig(Config):
    """The learning rate over the run: a linear warmup, a plateau, a decay."""

    name: Literal["wsd", "cosine", "inverse_sqrt"] = "wsd"
    """``wsd``: constant until the decay; ``cosine``: one cosine from the warmup to the end; ``inverse_sqrt``:
    1 / sqrt(step) from the warmup to the decay."""
    warmup: Duration = "0.02run"
    """Length of the linear warmup; warmup and decay together are at most the run."""
    start_frac: Real = Field(0.0, ge=0, lt=1)
    """Learning rate at the start of the warmup, as a fraction of the peak; above 0 to re-warm in continued
    pretraining."""
    decay: Duration = "0.2run"
    """Length of the final decay; not for ``cosine``, which decays from the end of the warmup."""
    shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay over its fraction x; ``sqrt`` is 1 - sqrt(x)."""
    final_frac: Real = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak (``inverse_sqrt``: of its value at the start of the
    decay)."""

    @property
    def given_decay(self) -> str:
        """The decay; zero for a cosine, which takes the whole time after the warmup."""
        return "0step" if self.name == "cosine" else self.decay

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        idle: tuple[str, ...] = ()
        why = ""
        if self.name == "cosine":
            idle, why = ("decay", "shape"), "with schedule 'cosine', which decays from the warmup on"
        elif split_duration(self.decay)[0] == 0:
            idle, why = ("shape", "final_frac"), f"without a decay: schedule.decay={self.decay}"
        for name in idle:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"schedule.{name} has no effect {why}")
        warms_up = split_duration(self.warmup)[0] > 0
        if self.start_frac and not warms_up:
            raise ValueError(f"schedule.start_frac={self.start_frac} has no effect without a warmup")
        if self.name == "inverse_sqrt" and not warms_up:
            raise ValueError("schedule 'inverse_sqrt' needs a warmup, which sets the scale of the decay")
        return self


class PrecisionConfig(Config):
    """Number formats."""

    master: Literal["fp32"] = "fp32"
    """Format of the weights that the optimizer updates."""
    compute: Literal["fp32", "bf16"] = "bf16"
    """Format of matmuls and activations."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format of the gradient reduction over ranks."""
    moments: Literal["fp32"] = "fp32"
    """Format of the optimizer's moments."""


class LossConfig(Config):
    """Next-token cross-entropy."""

    z_loss_coef: Real = Field(0.0, ge=0)
    """Weight of the squared log-partition of the output; 0: none."""
    chunk_bytes: Annotated[Whole, Field(ge=1)] | Literal["auto"] = placement("auto")
    """Bytes of logits, and of what is computed from them, that are in memory at a time; auto: 4 GiB on a GPU, where
    small tiles are slow and large vocabularies would be computed twice, 256 MiB on a CPU."""

    def tile_bytes(self, device: str) -> int:
        """Return ``chunk_bytes`` for a device of that type."""
        if self.chunk_bytes != "auto":
            return self.chunk_bytes
        return 2**28 if device == "cpu" else 2**32


class KeepConfig(Config):
    """Which checkpoints are kept. The best one and protected ones are kept in addition."""

    last: Whole = placement(2, ge=1)
    """Number of checkpoints to keep, the newest ones."""
    every: Interval | None = placement(None)
    """Keep also the first checkpoint of every so many steps or tokens, or of every such fraction of the run, for good.
    Absent: none."""
    blessed: Whole = placement(1, ge=0)
    """Keep also so many blessed checkpoints, the newest ones, and the next one that can become blessed."""
    blessed_after: Duration = placement("200step")
    """A checkpoint becomes blessed when the run has trained so much beyond it without a loss that was not finite and
    without a rejected checkpoint."""


def _keep_section(keep: int | KeepConfig) -> KeepConfig:
    return keep if isinstance(keep, KeepConfig) else KeepConfig(last=keep, blessed=0)


class CheckpointConfig(Config):
    """When checkpoints are saved, and which are kept."""

    every: Cadence | Literal["auto"] = placement("0.25run")
    """How often a checkpoint is saved; one is always saved at the end. auto: the interval that loses the least time,
    from the measured time for which saves block training and a failure for each 1,000 GPU-days."""
    keep: Count | KeepConfig = placement(2)
    """Number of complete checkpoints to keep, the newest ones; or a section."""
    best: str | None = placement(None)
    """Evaluated metric, such as ``metrics/eval/NAME/LanguageCrossEntropy``: the checkpoint with its lowest value is
    kept too, and exported. Compared are the steps that are evaluated and saved. Absent: only the newest."""
    verify: bool = placement(False)
    """Read each file again from the disk before a checkpoint is complete, in the thread that wrote it: a disk that has
    changed what was written makes the save fail. Reads as many bytes as are saved; training does not wait."""
    peer_copies: Cadence | None = placement(None)
    """How often the state is copied to shared memory, which outlives the ranks: after a fault the next attempt reads
    the newest copy, and no disk. Each checkpoint is copied there too. Takes the bytes of two checkpoints. Absent: no
    copies."""
    peer_node: str | None = placement(None)
    """HOST:PORT of ``smalti fleet hold`` on another node, whose memory holds the newest of these copies too: a run that
    has lost its node fetches it when it is started again. Takes the bytes of one more copy. Absent: this node alone."""
    save_to: str | None = placement(None)
    """URL or folder under which each saved checkpoint is copied in the background, to ``SAVE_TO/NAME/step-...``; a run
    whose folder has no checkpoint, damaged or older ones resumes from there. Absent: no copies."""
    save_to_keep: Count | KeepConfig | None = placement(None)
    """Which copies in ``save_to`` are kept: a number of the newest ones, or a section, as in ``keep``. The best one,
    and protected and registered ones, are kept too. Absent: no copy is deleted."""
    save_requests_per_s: Real = placement(100.0, gt=0)
    """Most requests per second to ``save_to``, of the whole job."""

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.save_to is not None and self.save_to.startswith(("http://", "https://", "hf://")):
            raise NotAllowed(
                f"save_to={self.save_to} cannot be written",
                allowed="a folder, s3://, gs://, az://, or a URL of fsspec",
                hint="save_to=s3://BUCKET/FOLDER",
            )
        if self.peer_node is not None and self.peer_copies is None:
            raise ValueError("peer_node has no effect without peer_copies")
        address = re.fullmatch(r".+:(\d{1,5})", self.peer_node or "")
        if self.peer_node is not None and (address is None or not 0 < int(address[1]) < 1 << 16):
            raise NotAllowed(
                f"peer_node={self.peer_node} is not the address of a node",
                allowed="HOST:PORT, and a port of 1 to 65535",
                hint="peer_node=node-2:7390, where 'smalti fleet hold' runs",
            )
        if self.save_to is None and self.save_requests_per_s != 100.0:
            raise ValueError("save_requests_per_s has no effect without save_to")
        if self.save_to is None and self.save_to_keep is not None:
            raise ValueError("save_to_keep has no effect without save_to")
        return self

    @property
    def keep_section(self) -> KeepConfig:
        """``keep`` as a section; a number is that of the newest ones, and nothing else is kept."""
        return _keep_section(self.keep)

    @property
    def save_to_keep_section(self) -> KeepConfig | None:
        """``save_to_keep`` as a section; None: no copy is deleted."""
        return None if self.save_to_keep is None else _keep_section(self.save_to_keep)


class TrainConfig(LengthConfig):
    """Length, batch, optimizer and placement of the training."""

    microbatch_tokens: Count | Literal["auto"] = placement("auto")
    """Tokens in one forward pass on one rank; auto: the most that the planner predicts to fit the rank's memory, on a
    CPU at most 16,384."""
    microbatch_trial: bool | Literal["auto"] = placement("auto")
    """Run the automatic microbatch forward and backward once before the first step; auto: on CUDA only."""
    optimizer: OptimizerConfig
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate schedule."""
    ema: EmaConfig | None = None
    """Keep a moving average of the weights too, which ``smalti export --ema`` writes. Absent: none."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    loss: LossConfig = LossConfig()
    """The loss."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks, axes of parallelism, devices, compilation."""
    nodes: NodesConfig | None = placement(None)
    """Several machines, with an agent on each. Absent: ``smalti train`` starts all ranks on this one."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    restart: RestartConfig = RestartConfig()
    """Restarts after faults."""
    health: HealthConfig | None = placement(None)
    """A check of the node after faults that may be its own, and when training is slow. Absent: none."""
    log_every: Cadence = placement("1step")
    """How often metrics are written."""
    eval_every: Cadence = placement("0.1run")
    """How often held-out loss is measured during training; always at the end."""
    eval_tokens: Whole = placement(65_536, ge=1)
    """Held-out tokens of each source that are measured during training."""

    @property
    def moments(self) -> int:
        """Tensors in fp32 beside each trained parameter: the optimizer's moments, and the average of weights."""
        return OPTIMIZERS[self.optimizer.name].moments + (self.ema is not None)

    @model_validator(mode="after")
    def _health_has_an_effect(self) -> Self:
        if self.health is not None and self.restart.attempts == 0:
            raise NotAllowed(
                "train.health has no effect with train.restart.attempts=0",
                allowed="a check before a restart, or neither",
                hint="remove train.health, or set train.restart.attempts=100",
            )
        return self

    @model_validator(mode="after")
    def _microbatch_fits_the_batch(self) -> Self:
        largest = max(self.global_batch_tokens, *(part.global_batch_tokens for part in self.batch_ramp), 0)
        if isinstance(self.microbatch_tokens, int) and self.microbatch_tokens > largest:
            limit = "the largest batch" if self.batch_ramp else "global_batch_tokens"
            raise ValueError(f"microbatch_tokens={self.microbatch_tokens} is more than {limit}={largest}")
        if self.microbatch_trial is True and self.microbatch_tokens != "auto":
            raise NotAllowed(
                f"microbatch_trial=true has no effect with microbatch_tokens={self.microbatch_tokens}",
                allowed="a trial of an automatic microbatch",
                hint="train.microbatch_tokens=auto, or remove microbatch_trial",
            )
        return self
