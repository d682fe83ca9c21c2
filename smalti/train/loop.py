"""The loop around the step: cadence of logs, evaluation and saves; stops; nothing of tensors.

    resume -> [ batch -> step -> log? -> evaluate? -> save? -> stop? ] ... -> last evaluation and save

All ranks run the same loop and vote on whatever one of them sees alone, so they enter every collective together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from smalti.base import clock, log
from smalti.base.errors import Interrupted, TryElsewhere
from smalti.config.run import JobConfig, RunConfig
from smalti.dist import checkpoint
from smalti.track.run import RunFolder
from smalti.train.batches import Batches, read_ahead
from smalti.train.cadence import Cadence
from smalti.train.record import Recorder
from smalti.train.signals import Stop, StopSignals
from smalti.train.step import Loss, StepResult, TrainState, train_step
from smalti.train.vote import Vote

Evaluate = Callable[[nn.Module, int], dict[str, float]]
"""(model, step) -> metrics; called on every rank at the same step."""


class Events(Protocol):
    """Where events go (``track.events.EventLog`` on rank 0, nowhere on the others)."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""


class Hook:
    """Code of the caller's at fixed places of the loop, on every rank. Override what is needed; return nothing."""

    def on_start(self, job: "Job") -> None:
        """Before the first step of this attempt."""

    def on_step(self, job: "Job", result: StepResult) -> None:
        """After each step. Reading a tensor of ``result`` waits for the device."""

    def on_checkpoint(self, job: "Job", path: str) -> None:
        """After a checkpoint is complete."""

    def on_stop(self, job: "Job") -> None:
        """After the last step of this attempt, when it ends without an error."""


@dataclass
class Job:
    """Everything that ``fit`` needs; made by ``train.job.build``."""

    config: JobConfig
    state: TrainState
    loss: Loss
    batches: Batches
    total_steps: int
    folder: RunFolder
    is_first: bool
    recorder: Recorder
    events: Events
    tensors: Callable[[], dict[str, Tensor]]
    """What a checkpoint holds, by name."""
    evaluate: Evaluate | None = None
    hooks: Sequence[Hook] = field(default_factory=tuple)

    @property
    def prefetch_steps(self) -> int:
        """Batches read ahead of the step."""
        return self.config.data.prefetch_steps if isinstance(self.config, RunConfig) else 2

    def status(self, state: str) -> None:
        """Write the run's state and heartbeat (rank 0)."""
        if self.is_first:
            self.folder.set_status(state, step=self.state.step)


def fit(job: Job) -> None:
    """Train until the end of the run.

    Raises TryElsewhere (exit 75) after SIGTERM and Interrupted (exit 130) after Ctrl-C, both with a checkpoint saved;
    Refusal where the loss is not finite.
    """
    state = job.state
    if state.step >= job.total_steps:
        log.get("train").info("%s is finished: all %d steps are done", job.folder.path, state.step)
        with job.recorder:
            job.status("done")
        return
    save_when, evaluate_when, log_when = (_cadence(job, every) for every in _cadences(job))
    heartbeat = Cadence("5s", total_steps=job.total_steps, global_batch_tokens=1)
    vote = Vote(3)
    job.status("running")
    with StopSignals() as signals, job.recorder:
        for hook in job.hooks:
            hook.on_start(job)
        batches = iter(read_ahead(job.batches, state.step, job.total_steps, job.prefetch_steps))
        stop = Stop.NONE
        while state.step < job.total_steps and not stop:
            upcoming = state.step + 1
            vote.start(signals.asked, save_when.due(upcoming), evaluate_when.due(upcoming))
            _one_step(job, batches)
            asked, save_now, evaluate_now = vote.result()
            stop, is_last = Stop(asked), state.step == job.total_steps
            if log_when.due(state.step) or save_now or evaluate_now or stop or is_last:
                job.recorder.flush(_mixture(job))
                log_when.done()
            if evaluate_now or is_last:
                _evaluate(job)
                evaluate_when.done()
            if save_now or stop or is_last:
                _save(job, must_succeed=bool(stop) or is_last)
                save_when.done()
            if heartbeat.due(state.step):
                job.status("running")
                heartbeat.done()
        for hook in job.hooks:
            hook.on_stop(job)
        _leave(job, stop)


def _one_step(job: Job, batches: Any) -> None:
    before_s = clock.now_s()
    microbatches = next(batches)
    wait_s = clock.now_s() - before_s
    lr = job.state.lr(job.state.step)
    result = train_step(job.state, microbatches, job.loss)
    job.recorder.add(job.state.step, lr, result, wait_s=wait_s)
    for hook in job.hooks:
        hook.on_step(job, result)


def _evaluate(job: Job) -> None:
    if job.evaluate is None:
        return
    before_s = clock.now_s()
    metrics = job.evaluate(job.state.model, job.state.step)
    seconds = clock.now_s() - before_s
    job.recorder.outside(seconds)
    job.recorder.write(job.state.step, metrics)
    job.events.write("eval", step=job.state.step, seconds=round(seconds, 3), metrics=metrics)


def _save(job: Job, *, must_succeed: bool) -> None:
    before_s = clock.now_s()
    step = job.state.step
    kept = job.config.train.checkpoint.keep
    try:
        path = checkpoint.save(job.folder.checkpoints, step, job.tensors(), train_state(job), keep=kept)
    except TryElsewhere as error:
        job.events.write("checkpoint_failed", step=step, reason=error.message)
        if must_succeed:
            raise
        log.get("train").warning("%s; training goes on and saves again at the next turn", error.message)
        return
    finally:
        job.recorder.outside(clock.now_s() - before_s)
    seconds = clock.now_s() - before_s
    job.recorder.write(step, {"ckpt/save_s": seconds})
    job.events.write("checkpoint_saved", step=step, path=path, seconds=round(seconds, 3))
    for hook in job.hooks:
        hook.on_checkpoint(job, path)


def train_state(job: Job) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors."""
    return {
        "step": job.state.step,
        "tokens": job.recorder.tokens,
        "train_s": job.recorder.train_s,
        "stream": job.batches.state(),
    }


def _leave(job: Job, stop: Stop) -> None:
    step = job.state.step
    if stop == Stop.NONE or step == job.total_steps:
        job.events.write("run_finished", step=step)
        job.status("done")
        return
    job.status("interrupted" if stop == Stop.INTERRUPTED else "stopped")
    job.events.write("stopped", step=step, reason=stop.name.lower())
    text = f"stopped at step {step} of {job.total_steps} with a checkpoint saved"
    hint = "run the same command again to go on"
    raise Interrupted(text, hint=hint) if stop == Stop.INTERRUPTED else TryElsewhere(text, hint=hint)


def _mixture(job: Job) -> dict[str, float]:
    counts = getattr(job.batches, "tokens_by_source", None)
    if counts is None:
        return {}
    return {f"data/mix/{name}/tokens": float(tokens) for name, tokens in counts(job.state.step).items()}


def _cadences(job: Job) -> tuple[str, str, str]:
    train = job.config.train
    return train.checkpoint.every, train.eval_every, train.log_every


def _cadence(job: Job, every: str) -> Cadence:
    return Cadence(every, total_steps=job.total_steps, global_batch_tokens=job.config.train.global_batch_tokens)
