"""Builds a job that ``fit`` can run from one config: the composition root of training.

Model, loss and batches that the caller does not pass are built from the sections of the config.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base import env
from smalti.base.env import World
from smalti.base.errors import UserError
from smalti.config.durations import to_seconds
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import Layout
from smalti.data.stream.inputs import check_inputs, read_inputs
from smalti.data.stream.stream import Stream
from smalti.distributed.group import lost
from smalti.distributed.group import mesh as meshes
from smalti.distributed.group import world as worlds
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import sequence
from smalti.distributed.parallel.pipeline import StagedDecoder
from smalti.track import collectives
from smalti.track.attempts import record_failure
from smalti.track.events import EventLog, NoEventLog
from smalti.track.progress import NoProgress, ProgressWriter, open_slot
from smalti.track.run import RunFolder
from smalti.train import adapters, best, bless, chaos, checkpoint_copies, forgetting, oom, profile, rank_setup, resume
from smalti.train import microbatch as microbatches
from smalti.train import pipeline as pipelines
from smalti.train.batches import Batches, TokenBatches
from smalti.train.gradient_sums import with_gradient_sums
from smalti.train.hooks import Hook
from smalti.train.loop import Evaluate, Job, fit
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer, moments
from smalti.train.recorder import build_recorder
from smalti.train.saving import peer_memory
from smalti.train.schedule import LearningRate
from smalti.train.sharded_model import check_origin, describe, sharded
from smalti.train.step import ForwardBackward, Loss, StatefulLoss, TrainState, one_by_one
from smalti.train.stragglers import compare_ranks
from smalti.train.weight_average import WeightAverage
from smalti.train.weights import keep_tokenizer

T = TypeVar("T")

MakeEvaluate = Callable[[RunConfig, Mapping[str, bytes], Mesh], Evaluate | None]
"""(config, what rank 0 has read of sources and held-out sets, mesh) -> the evaluation of held-out loss."""


MakeLoss = Callable[[RunConfig, Mesh, torch.device], Loss]
"""(config, mesh, device) -> the loss of a run whose config asks for another than next-token cross-entropy."""

MakeTasks = Callable[[RunConfig, Mesh], tuple[Evaluate | None, Sequence[Hook]]]
"""(config, mesh) -> the evaluation of the tasks of ``evals`` on all ranks, and the hooks that run other tasks."""


def run(
    config: RunConfig,
    origins: Mapping[str, str],
    *,
    evaluation: MakeEvaluate,
    tasks: MakeTasks | None = None,
    make_loss: MakeLoss | None = None,
    fork: bool = False,
    trial_steps: int | None = None,
    progress: ProgressWriter | NoProgress | None = None,
) -> None:
    """Build and fit as a rank of the world that this process is in, and leave that world.

    A rank that has failed alone is still in that world when its error is raised: the process must end at once
    (``worlds.may_leave``). progress: the rank's slot where it is open already.
    """
    attempt = Attempt(progress=progress)
    try:
        with recorded(attempt):
            job = build(config, make_loss=make_loss, origins=origins, fork=fork, attempt=attempt)
            job.evaluate = evaluation(config, job.indexes, job.mesh)
            if tasks is not None and trial_steps is None:
                set_tasks(job, config, tasks)
            job.trial_steps = trial_steps
            fit(job)
    finally:
        if worlds.may_leave(sys.exception()):
            worlds.leave()


def set_tasks(job: Job, config: RunConfig, tasks: MakeTasks) -> None:
    """Build the tasks of ``evals``, if the config has them."""
    if config.evals is not None:
        job.evaluate_tasks, hooks = tasks(config, job.mesh)
        job.hooks, job.tasks_every = (*job.hooks, *hooks), config.evals.every


@dataclass
class Attempt:
    """Hosts and run folder of the attempt, filled in during ``build`` for error reports."""

    hosts: tuple[str, ...] = ()
    """The host of each rank, once the ranks have met; empty in a world of one."""
    folder: RunFolder | None = None
    progress: ProgressWriter | NoProgress | None = None
    """The slot of this rank, opened by the caller or with the run folder."""

    def done(self, part: T) -> T:
        """Return ``part``, a result of the set-up; it is a sign of life."""
        if self.progress is not None:
            self.progress.beat()
        return part

    def set_folder(self, folder: RunFolder) -> None:
        """Store the run folder, so that errors are recorded in it, and open the slot of this rank."""
        self.folder = folder
        if self.progress is None:
            self.progress = open_slot(folder.log_folder(), env.world())
        self.progress.beat()
        self.progress.collectives = worlds.count_collectives
        if (nonce := env.rank_nonce()) is not None:
            collectives.answer_requests(nonce, worlds.collectives_by_group)


@contextmanager
def recorded(attempt: Attempt) -> Iterator[None]:
    """Context manager: replace an error caused by a lost rank by one that names the rank; without an agent, record the
    end of the attempt."""
    try:
        yield
    except Exception as error:
        foreign = not env.attempt_is_open()
        try:
            lost.raise_with_lost_ranks(error, attempt.hosts, find_silent=foreign)
        except Exception as named:
            writes = named.writes if isinstance(named, lost.LostPeer) else env.world().is_first
            if attempt.folder is not None and foreign and writes:
                record_failure(attempt.folder, named)
            raise


def build(
    config: JobConfig,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    make_loss: MakeLoss | None = None,
    batches: Batches | None = None,
    evaluate: Evaluate | None = None,
    hooks: Sequence[Hook] = (),
    origins: Mapping[str, str] | None = None,
    fork: bool = False,
    attempt: Attempt | None = None,
) -> Job:
    """Build all that ``fit`` needs, as ``train.api.build``, whose arguments these are. attempt: is filled in."""
    world, attempt = env.world(), attempt or Attempt()
    _require_described(config, model=model, loss=loss, batches=batches)
    device, resolved, attempt.hosts = attempt.done(rank_setup.join_world(config, world, own_model=model is not None))
    layout, axes = rank_setup.resolve_layout(config, device, world, own_model=model is not None)
    resolved, mesh = resolved | axes, meshes.build(device, layout)
    folder, config = resume.open_folder(config, world, origins or {}, fork=fork, opened=attempt.set_folder)
    events: EventLog | NoEventLog = folder.event_log() if world.is_first else NoEventLog()
    reporter = oom.Reporter(config, folder, world.rank, layout, oom.placement(config, layout, device))
    indexes = attempt.done(_read_inputs(config) if isinstance(config, RunConfig) and batches is None else {})
    if isinstance(config, RunConfig):
        loss = loss or _loss_of(config, make_loss, mesh, device)
        if batches is None:
            resolved |= _choose_microbatch(config, reporter, device, world)
            batches = _token_batches(config, indexes, folder, mesh, device, resolved["microbatch_tokens"])
    assert batches is not None and loss is not None
    stored = checkpoint_copies.restore(config, folder, events)
    path = attempt.done((checkpoints := resume.Checkpoints(folder, events, peer_memory(config), stored)).find())
    frozen = check_origin(config, path, origins, own_model=model is not None)
    model = attempt.done(sharded(config, model, mesh, device, resumes=path is not None))
    state = state_of(config, model, loss, mesh, device, attempt.progress)
    saved = attempt.done(checkpoints.load(path, state, tensors_of(state), batches, frozen))
    resolved |= _try_microbatch(config, resolved, state, loss, batches, reporter, device)
    peak = rank_setup.peak_flops_per_s(device, config.train.precision.compute, world)
    events.write("auto_resolved", **resolved, **describe(config, layout, device), peak_flops_per_s=peak)
    job = Job(
        config=config,
        state=state,
        loss=loss,
        batches=batches,
        length=config.length,
        folder=folder,
        is_first=world.is_first,
        recorder=build_recorder(config, folder, world, events, saved, state=state, peak_flops_per_s=peak),
        events=events,
        tensors=lambda: tensors_of(state),
        mesh=mesh,
        hosts=attempt.hosts,
        evaluate=evaluate,
        hooks=(*_hooks(config, world, stored), *hooks),
        indexes=indexes,
        out_of_memory=reporter,
        frozen=frozen,
        **_resolved_fields(config, resolved),
    )
    chaos.install(job)
    return job


def _hooks(config: JobConfig, world: World, stored: checkpoint_copies.StoredCheckpoints | None) -> tuple[Hook, ...]:
    """Return the hooks that the config asks for. stored: the copies that were searched."""
    return (
        *best.watch(config),
        bless.Bless(config.train.checkpoint.keep_section.blessed_after),
        *checkpoint_copies.watch(config, stored),
        *forgetting.watch(config),
        *profile.of_config(config.profile, world.world_size),
        *compare_ranks(world),
    )


def _loss_of(config: RunConfig, make_loss: MakeLoss | None, mesh: Mesh, device: torch.device) -> Loss:
    if config.tune is None or not config.tune.has_own_loss:
        return LanguageLoss(config.model, config.train.loss)
    if make_loss is None:
        raise UserError(
            f"the loss of this config is {config.tune.loss}, and build() was given none",
            allowed="loss= or make_loss=",
            hint="with tuning = smalti.tune.run.Tuning(): make_loss=tuning.loss, evaluation=tuning.evaluation",
        )
    return make_loss(config, mesh, device)


def _choose_microbatch(config: RunConfig, reporter: oom.Reporter, device: torch.device, world: World) -> dict[str, Any]:
    """Return the fields of ``auto_resolved`` for the first microbatch size, the same on all ranks. A collective."""
    limit = resume.microbatch_limit(reporter.folder, reporter.of)
    chosen = microbatches.choose(config, reporter.layout, device, world, limit_tokens=limit)
    return {"microbatch_tokens": chosen.tokens, "microbatch_by": chosen.by}


def _try_microbatch(
    config: JobConfig,
    resolved: Mapping[str, Any],
    state: TrainState,
    loss: Loss,
    batches: Batches,
    reporter: oom.Reporter,
    device: torch.device,
) -> dict[str, Any]:
    """Run the trial of the microbatch if there is one; return the fields of ``auto_resolved`` that it changed."""
    if not (isinstance(config, RunConfig) and isinstance(batches, TokenBatches) and "microbatch_tokens" in resolved):
        return {}
    if not microbatches.wants_trial(config, device):
        return {}
    trial = microbatches.Trial(config, reporter.layout, state, loss, batches, reporter)
    tokens = trial.settle(resolved["microbatch_tokens"])
    return {} if tokens == resolved["microbatch_tokens"] else {"microbatch_tokens": tokens, "microbatch_by": "trial"}


def _require_described(config: JobConfig, **arguments: object) -> None:
    """Raise UserError for an argument of ``build`` that is None and that the config does not describe."""
    absent = [name for name, value in arguments.items() if value is None]
    if absent and not isinstance(config, RunConfig):
        raise UserError(
            f"build() was given no {absent[0]}, and a {type(config).__name__} does not describe one",
            hint=f"build(config, {absent[0]}=...), or give a RunConfig with model and data sections",
        )


# ---- model ----------------------------------------------------------------------------------------------------------


def state_of(
    config: JobConfig,
    model: nn.Module,
    loss: Loss,
    mesh: Mesh,
    device: torch.device,
    progress: ProgressWriter | NoProgress | None = None,
) -> TrainState:
    """Build the initial ``TrainState``: the optimizer with its moments, and the forward and backward pass."""
    optimizer = build_optimizer(model, config.train.optimizer)
    lr = LearningRate.of(config)
    loss_state = loss.state if isinstance(loss, StatefulLoss) else None
    forward_backward = with_gradient_sums(_forward_backward(config, mesh.layout, model, loss, device), mesh)
    clip_norm = config.train.optimizer.clip_norm
    state = TrainState(
        model,
        optimizer,
        lr,
        clip_norm,
        loss_state,
        forward_backward,
        mesh.layout.tensor,
        mesh.layout.pipeline,
        progress=progress or NoProgress(),
    )
    if config.train.ema is not None:
        state.average = WeightAverage(config.train.ema, config.length, optimizer)
    return state


def _forward_backward(
    config: JobConfig, layout: Layout, model: nn.Module, loss: Loss, device: torch.device
) -> ForwardBackward:
    """Return the function that runs the microbatches: one by one, or through the pipeline stages of the model."""
    if layout.pipeline == 1:
        return one_by_one
    assert isinstance(model, StagedDecoder), "rank_setup.join_world refuses a model that was given"
    schedule = config.train.parallel.pipeline_schedule
    if not isinstance(loss, LanguageLoss):
        raise UserError(
            f"train.parallel.pipeline={layout.pipeline} with {type(loss).__name__}",
            allowed="the loss of the config; others need a model in one piece: pipeline=1",
        )
    if schedule == "zero_bubble" and rank_setup.compiles(config, device):
        raise UserError(
            "train.parallel.pipeline_schedule=zero_bubble cuts the backward pass in two, which compiled blocks cannot",
            allowed="1f1b, interleaved, or compile=false",
            hint="train.parallel.compile=false",
        )
    if loss.balance is not None:
        loss.balance.local_rows = model.local_rows
    return pipelines.PipelineForwardBackward(schedule)


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint: weights, persistent buffers, optimizer moments and the state of the loss."""
    trained = adapters.trained_only(state.model, state.model.state_dict())
    weights = {f"model.{name}": tensor for name, tensor in trained.items()}
    of_loss = state.loss_state.tensors() if state.loss_state else {}
    return {**weights, **moments(state.model, state.optimizer), **of_loss}


# ---- data and sinks -------------------------------------------------------------------------------------------------


def _read_inputs(config: RunConfig) -> dict[str, bytes]:
    config.data.require_every_source_used()

    def read() -> dict[str, bytes]:
        inputs = read_inputs(config.data)
        check_inputs(config, inputs)  # it reads the tokenizer too
        return inputs

    return worlds.broadcast_from_rank0(read)


def _token_batches(
    config: RunConfig,
    indexes: dict[str, bytes],
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    microbatch: int,
) -> TokenBatches:
    if dist.get_rank() == 0 and config.data.tokenizer is not None:
        keep_tokenizer(config.data.tokenizer, folder.path / "tokenizer", config.init_from)
    stream = Stream(
        config.data,
        indexes=indexes,
        seed=config.seed,
        length=config.length,
        rank=mesh.data_rank,
        world_size=mesh.layout.data_ranks,
        microbatch_tokens=microbatch,
        equal_rows=config.train.parallel.dispatch == "static" and mesh.layout.expert > 1,
    )
    return TokenBatches(
        stream,
        device,
        mask_documents=config.data.mask_documents,
        vocab_size=config.model.vocab_size,
        own_part=sequence.own_part(mesh, context=config.train.parallel.context),
    )


def _resolved_fields(config: JobConfig, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the job that follow from what ``auto`` was resolved to, and those of reading ahead."""
    fields = {"microbatch_tokens": resolved.get("microbatch_tokens"), "compiles_first": bool(resolved["compile"])}
    if not isinstance(config, RunConfig):
        return fields
    seconds = to_seconds(config.data.fetch.prefetch)
    assert seconds is not None
    return {**fields, "prefetch_s": seconds, "prefetch_bytes": config.data.fetch.prefetch_bytes}
