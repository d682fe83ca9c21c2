"""The config of a run: the fields of every training, and the whole config of ``smalti train``."""

from typing import Self

from pydantic import model_validator

from smalti.config.adapter import AdapterConfig
from smalti.config.chaos import ChaosConfig
from smalti.config.data import DataConfig, PastConfig
from smalti.config.durations import RunLength, check_schedule
from smalti.config.eval import InLoopConfig
from smalti.config.launch import LaunchConfig
from smalti.config.model import ModelConfig
from smalti.config.places import LocalFolder, RunName
from smalti.config.profile import ProfileConfig
from smalti.config.schema import Config, NotAllowed, Whole, placement
from smalti.config.track import TrackConfig
from smalti.config.train import TrainConfig
from smalti.config.tune import TuneConfig


class JobConfig(Config):
    """The fields of every kind of training, independent of its model and data."""

    name: RunName
    """Name of the run and of its folder."""
    seed: Whole = 17
    """Seed of the data order and of the initial weights."""
    folder: LocalFolder | None = placement(None)
    """The run folder; absent: ``runs/<name>``. Ignored in the config of a run folder, which may be moved."""
    init_from: str | None = None
    """Run, checkpoint or Hugging Face folder whose weights (only) the run starts from. The model must be the same, but
    for its context: ``rope_theta``, ``rope_scaling``, windows and the longest sequence may be stated otherwise."""
    train: TrainConfig
    """Length, batch, optimizer and placement of the training."""
    track: TrackConfig = TrackConfig()
    """Where metrics are written."""
    profile: ProfileConfig = ProfileConfig()
    """Steps to profile."""
    chaos: ChaosConfig | None = placement(None)
    """Faults to inject, to test that the run survives them; absent: none."""

    @property
    def run_folder(self) -> str:
        """The run folder, with the default applied."""
        return self.folder or f"runs/{self.name}"

    def on(self, device: str) -> Self:
        """Return the config with ``loss.chunk_bytes`` resolved for a device type: ``cpu``, or a GPU."""
        loss = self.train.loss.model_copy(update={"chunk_bytes": self.train.loss.tile_bytes(device)})
        return self.model_copy(update={"train": self.train.model_copy(update={"loss": loss})})

    @property
    def history(self) -> tuple[PastConfig, ...]:
        """The schedules before each fork; only runs of ``smalti train`` are forked."""
        return ()

    @property
    def length(self) -> RunLength:
        """Steps of the run and tokens of each step, those before a fork by its history."""
        return RunLength.of(self.train, self.history)

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Self:
        train, profile = self.train, self.profile
        check_schedule(self.length, train.duration, train.schedule.warmup, train.schedule.given_decay)
        if profile.steps is not None and profile.steps[0] > self.length.total_steps:
            raise NotAllowed(
                f"profile.steps={list(profile.steps)} has no effect: the run has {self.length.total_steps} steps",
                allowed=f"a window that starts by step {self.length.total_steps}",
                hint=f"profile.steps=[{self.length.total_steps},{self.length.total_steps}]",
            )
        if self.chaos is not None:
            self.chaos.planned(total_steps=self.length.total_steps, ranks=train.parallel.ranks)
        return self


class RunConfig(JobConfig):
    """The config of ``smalti train``. Together with the data it determines every number of the run."""

    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    adapter: AdapterConfig | None = None
    """Adapters to train in place of the weights, which come from ``init_from``; absent: all weights are trained."""
    tune: TuneConfig | None = None
    """Tuning on examples, by ``smalti tune``; absent: training on documents."""
    evals: InLoopConfig | None = placement(None)
    """Tasks that run during training; absent: held-out loss alone (``train.eval_every``)."""
    launch: LaunchConfig | None = placement(None)
    """How ``smalti fleet launch`` queues the run; ``smalti train`` does not read it."""

    @property
    def frozen_origins(self) -> dict[str, str]:
        """Paths of weights that are read on every attempt and never trained: the ``base`` of adapters or a live
        reference, and the ``teacher``."""
        tune, paths = self.tune, {}
        is_live = tune is not None and tune.preference is not None and tune.preference.reference_or_default == "live"
        if self.init_from is not None and (self.adapter is not None or is_live):
            paths["base"] = self.init_from
        if tune is not None and tune.distill is not None:
            paths["teacher"] = tune.distill.teacher
        return paths

    @property
    def history(self) -> tuple[PastConfig, ...]:
        """The schedules before each fork."""
        return self.data.history

    @model_validator(mode="after")
    def _batch_of_whole_sequences(self) -> Self:
        micro = self.train.microbatch_tokens
        longest = self.model.max_position_embeddings
        fields = {part.global_batch_tokens: f"train.batch_ramp[{i}]" for i, part in enumerate(self.train.batch_ramp)}
        fields[self.train.global_batch_tokens] = "train"
        keys = {stage.seq_len: f"data.stages[{i}].seq_len" for i, stage in enumerate(self.data.stages)}
        keys[self.data.seq_len] = "data.seq_len"
        for batch, seq_len in self.batches_and_lengths:
            field = fields.get(batch, "data.history")
            key = keys.get(seq_len, "data.history.seq_len")
            if batch % seq_len:
                below, above = batch // seq_len * seq_len, (batch // seq_len + 1) * seq_len
                raise ValueError(
                    f"{field}.global_batch_tokens={batch} is not a multiple of {key}={seq_len}; "
                    + (f"the nearest are {below} and {above}" if below else f"the least is {above}")
                )
            if isinstance(micro, int) and micro % seq_len:
                raise ValueError(f"train.microbatch_tokens={micro} is not a multiple of {key}={seq_len}")
            if seq_len > longest:
                raise ValueError(f"{key}={seq_len} is longer than model.max_position_embeddings={longest}")
        return self

    @model_validator(mode="after")
    def _something_to_retain(self) -> Self:
        if self.data.retain and self.init_from is None:
            raise NotAllowed(
                "data.retain has no effect without init_from: a new model has nothing to retain",
                allowed="data.retain in a run that continues a model",
                hint="init_from=runs/NAME or a Hugging Face folder, or remove data.retain",
            )
        return self

    @model_validator(mode="after")
    def _adapter_fits(self) -> Self:
        if self.adapter is None:
            return self
        if self.init_from is None:
            raise NotAllowed(
                "an adapter without init_from: it is trained beside the weights of a finished model",
                allowed="adapter with init_from",
                hint="init_from=runs/NAME or a Hugging Face folder, or remove adapter",
            )
        if self.train.ema is not None:
            raise NotAllowed(
                "train.ema with an adapter: adapters are exported as they were trained last",
                allowed="train.ema where all weights are trained",
                hint="remove train.ema",
            )
        self.adapter.check(self.model)
        return self

    @model_validator(mode="after")
    def _tunes_a_model(self) -> Self:
        if self.tune is not None and self.init_from is None:
            raise NotAllowed(
                "tune without init_from: there is no model to tune",
                allowed="a run folder, a checkpoint or a Hugging Face folder",
                hint="init_from=runs/NAME/export",
            )
        if self.tune is not None and (self.tune.preference or self.tune.reward) and len(self.data.sources) > 1:
            raise NotAllowed(
                f"data.sources has {', '.join(self.data.sources)}: a loss of {self.tune.kind} is over pairs of answers",
                allowed="the examples alone",
                hint="remove the other sources and data.stages",
            )
        return self

    @model_validator(mode="after")
    def _tuning_fits(self) -> Self:
        tune, parallel = self.tune, self.train.parallel
        if bool(self.model.num_labels) != bool(tune is not None and tune.reward is not None):
            raise NotAllowed(
                f"model.num_labels={self.model.num_labels or 'null'} "
                + ("without tune.reward" if self.model.num_labels else "with tune.reward"),
                allowed="num_labels=1, a model with a score, with tune.reward alone",
                hint="smalti tune reward RECIPE sets it",
            )
        if tune is None or not tune.has_own_loss:
            return self
        for axis in ("sequence", "pipeline") if tune.kind != "sft" else ("pipeline",):
            if getattr(parallel, axis) != 1:
                raise NotAllowed(
                    f"train.parallel.{axis}={getattr(parallel, axis)} with tune.{tune.kind}: its loss needs "
                    + ("whole rows" if axis == "sequence" else "a model in one piece"),
                    allowed=f"train.parallel.{axis}=1",
                    hint="the axes shard and tensor split the model and its activations",
                )
        return self

    @model_validator(mode="after")
    def _router_learns(self) -> Self:
        if self.init_from is None and self.model.router_weighs_alike:
            fixed = "" if self.model.family in ("decoder", "dbrx", "olmoe", "qwen3_moe") else " model.family=olmoe"
            raise NotAllowed(
                "model.moe.num_experts_per_tok=1 with norm_topk_prob=true: the weight of the only expert is always 1, "
                "so the router would get gradients from its balance losses alone",
                allowed="norm_topk_prob=false with one expert a token, or more experts a token",
                hint=f"model.moe.norm_topk_prob=false{fixed}",
            )
        return self

    @property
    def seq_len_parts(self) -> tuple[tuple[int, int], ...]:
        """(first step, seq_len) of the segments of the run with sequences of one length, from step 0 on."""
        segments: list[tuple[int, int]] = []
        data, length, ends = self.data, self.length, self.length.total_steps
        while True:  # from the last fork back to the first step
            at = data.history[-1].at_step if data.history else 0
            starts = [0, *(length.step_at(stage.until) for stage in data.stages[:-1])]
            spans = zip(starts, [*starts[1:], ends], data.seq_lens, strict=True)
            segments = [
                (max(start, at), seq_len) for start, end, seq_len in spans if end > at and start < ends
            ] + segments
            if not data.history:
                break
            data, length = data.before_fork()
            ends = at
        return tuple(part for i, part in enumerate(segments) if i == 0 or segments[i - 1][1] != part[1])

    @property
    def batches_and_lengths(self) -> tuple[tuple[int, int], ...]:
        """The pairs (tokens in a step, seq_len) that occur, in the order of the run."""
        length, lengths = self.length, self.seq_len_parts
        steps = sorted({start for start, _ in (*length.batches, *lengths) if start < length.total_steps})
        pairs = [(length.batch_tokens(step), [n for start, n in lengths if start <= step][-1]) for step in steps]
        return tuple(dict.fromkeys(pairs))

    def tokens_by_seq_len(self, steps: int | None = None) -> dict[int, int]:
        """Return the tokens of the first ``steps`` steps (default: of the run) by sequence length."""
        length = self.length
        tokens_of: dict[int, int] = {}
        end = length.total_steps if steps is None else steps
        starts = [start for start, _ in self.seq_len_parts]
        for (start, seq_len), stop in zip(self.seq_len_parts, [*starts[1:], end], strict=True):
            tokens = length.tokens(min(stop, end)) - length.tokens(min(start, end))
            tokens_of[seq_len] = tokens_of.get(seq_len, 0) + tokens
        return {seq_len: tokens for seq_len, tokens in tokens_of.items() if tokens}
