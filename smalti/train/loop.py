"""The loop around the step: cadence of logs, evaluation and saves; stops; nothing of tensors.

    resume -> [ batch -> step -> log? -> evaluate? -> save? -> stop? ] ... -> last evaluation and save

All ranks run the same loop and vote on whatever one of them sees alone, so they enter every collective together. No
rank begins a step before all have its batch: with the votes of a step each rank says whether it has the next batch
already, and only where one has not, they vote on until it has. So a wait for data is a wait between two steps, in which
a stop is heard and a checkpoint can be written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from smalti.base import clock, log
from smalti.base.errors import Interrupted, RetryableError, UserError
from smalti.config.durations import RunLength
from smalti.config.run import JobConfig
from smalti.data.fetch import counts
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import world as worlds
from smalti.distributed.parallel.mesh import Mesh
from smalti.track.checkpoints import size_bytes
from smalti.track.run import RunFolder
from smalti.train.batches import Batches, TokenBatches
from smalti.train.cadence import Cadence
from smalti.train.garbage import BetweenSteps
from smalti.train.oom import Reporter
from smalti.train.read_ahead import ReadAhead
from smalti.train.record import NotFinite, Recorder
from smalti.train.signals import Stop, StopSignals
from smalti.train.step import Loss, StepResult, TrainState, train_step
from smalti.train.vote import Vote

Evaluate = Callable[[nn.Module, int], dict[str, float]]
"""(model, step) -> metrics; called on every rank at the same step."""

_SLOW_S, _TELL_SLOW_S = 1.0, 60.0
_HEAR_S = 0.5
"""How often ranks that wait for data ask each other whether to stop."""
READ_THREADS = 8
"""Batches of the stream that are read at a time, where a store's latency asks for it."""


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

    def on_eval(self, job: "Job", metrics: Mapping[str, float]) -> None:
        """After held-out loss was measured; the metrics are the same on every rank."""

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
    length: RunLength
    folder: RunFolder
    is_first: bool
    recorder: Recorder
    events: Events
    tensors: Callable[[], dict[str, Tensor]]
    """What a checkpoint holds, by name."""
    mesh: Mesh
    """The ranks along the axes of parallelism."""
    evaluate: Evaluate | None = None
    hooks: Sequence[Hook] = field(default_factory=tuple)
    microbatch_tokens: int | None = None
    """Of one forward pass on one rank, whole rows; None for foreign batches."""
    indexes: Mapping[str, bytes] = field(default_factory=dict)
    """What rank 0 has read of sources and held-out sets (``data.inputs.read_inputs``); empty for foreign batches."""
    prefetch_s: float = 10.0
    """Seconds of training that are read ahead."""
    prefetch_bytes: int = 1 << 30
    out_of_memory: Reporter | None = None
    """Who says that a step ran out of memory; absent: the error passes as it is."""
    trial_steps: int | None = None
    """Of a trial: training ends after so many steps, as it would at the end of the run."""
    has_read: bool = False
    told_slow_s: float = -math.inf

    @property
    def total_steps(self) -> int:
        """Steps that are trained: of the whole run, or of its trial."""
        return min(self.length.total_steps, self.trial_steps or self.length.total_steps)

    def status(self, state: str) -> None:
        """Write the run's state and heartbeat (rank 0)."""
        if self.is_first:
            self.folder.set_status(state, step=self.state.step)


def fit(job: Job) -> None:
    """Train until the end of the run.

    Raises RetryableError (exit 75) after SIGTERM and Interrupted (exit 130) after Ctrl-C, both with a checkpoint saved;
    NotFinite (exit 3) where a loss or a gradient norm is not finite, with a checkpoint of the step before it.
    """
    state = job.state
    if state.step >= job.total_steps:
        log.get("train").info("%s is finished: all %d steps are done", job.folder.path, state.step)
        with job.recorder:
            job.status("done")
        return
    save_when, evaluate_when, log_when = (Cadence(every, job.length) for every in _cadences(job))
    heartbeat = Cadence("5s", job.length)
    vote = Vote(4)
    job.status("running")
    with StopSignals() as signals, job.recorder, _reading(job) as batches, BetweenSteps() as garbage:
        for hook in job.hooks:
            hook.on_start(job)
        if state.step == 0 and job.config.init_from is not None:  # what the weights could before they learn on
            _evaluate(job)
        stop, lacking, saved_step = Stop.NONE, 1, state.step
        while state.step < job.total_steps and not stop:
            upcoming, before_s = state.step + 1, clock.now_s()
            garbage.step(upcoming)
            stop = _wait_for_data(signals, vote, batches) if lacking else stop
            save_now = evaluate_now = 0
            if not stop:
                lacks_next = not batches.has(upcoming)
                vote.start(signals.asked, save_when.due(upcoming), evaluate_when.due(upcoming), lacks_next)
                _one_step(job, batches, before_s)
                asked, save_now, evaluate_now, lacking = vote.result()
                stop = Stop(asked)
            is_last = state.step == job.total_steps
            if log_when.due(state.step) or save_now or evaluate_now or stop or is_last:
                try:
                    job.recorder.flush(_of_data(job))
                except NotFinite as error:
                    _back_to_the_last_good_step(job, worlds.on_all_ranks(error), saved_step)
                    raise
                log_when.done()
            if evaluate_now or is_last:
                _evaluate(job)
                evaluate_when.done()
            if (save_now or stop or is_last) and state.step != saved_step:
                if _save(job, must_succeed=bool(stop) or is_last):
                    saved_step = state.step
                save_when.done()
                garbage.all()
            if heartbeat.due(state.step):
                job.status("running")
                heartbeat.done()
        for hook in job.hooks:
            hook.on_stop(job)
        _leave(job, stop)


def _reading(job: Job) -> ReadAhead[Any]:
    """Batches read ahead; those of our stream in several threads, and in the few bytes that they have on disk."""
    ours, first, last = job.batches, job.state.step, job.total_steps
    kept: Any = {"prefetch_s": job.prefetch_s, "prefetch_bytes": job.prefetch_bytes}
    if isinstance(ours, TokenBatches):
        return ReadAhead(ours.read, first, last, threads=READ_THREADS, interrupt=ours.close, **kept)
    return ReadAhead(ours.batch, first, last, **kept)


def _wait_for_data(signals: StopSignals, vote: Vote, batches: ReadAhead[Any]) -> Stop:
    """Return on all ranks together when each has its next batch, or when one was asked to stop."""
    stop, lacking = Stop.NONE, 1
    while lacking and not stop:
        has = batches.wait(_HEAR_S)
        vote.start(signals.asked, 0, 0, not has)
        asked, _, _, lacking = vote.result()
        stop = Stop(asked)
    return stop


def _one_step(job: Job, batches: Any, before_s: float) -> None:
    """``before_s``: since when the step waits for its data."""
    microbatches = next(batches)
    wait_s = clock.now_s() - before_s
    _tell_slow(job, wait_s)
    if isinstance(job.batches, TokenBatches):
        microbatches = job.batches.place(microbatches)
    if not len(microbatches):
        raise UserError(
            f"batch({job.state.step}) of {type(job.batches).__name__} gave no microbatch",
            allowed="the same number on every rank, at least one",
            hint="where a rank is short of data, give it a microbatch whose loss and weight are 0",
        )
    lr = job.state.lr(job.state.step)
    try:
        result = train_step(job.state, microbatches, job.loss)
    except (RuntimeError, MemoryError) as error:
        reporter = job.out_of_memory
        if reporter is None:
            raise
        step, phase = job.state.step, job.state.phase
        memory_error = reporter.report(error, job.batches, microbatches, step=step, phase=phase)
        if memory_error is None:
            raise
        raise memory_error from error
    job.recorder.add(job.state.step, lr, result, wait_s=wait_s)
    for hook in job.hooks:
        hook.on_step(job, result)


def _tell_slow(job: Job, wait_s: float) -> None:
    """A warning and an event where a step waited for its data, but for the first one, which always does."""
    first, job.has_read = not job.has_read, True
    if first or wait_s < _SLOW_S or clock.now_s() - job.told_slow_s < _TELL_SLOW_S:
        return
    job.told_slow_s = clock.now_s()
    log.get("train").warning("step %d waited %.1f s for its data", job.state.step, wait_s)
    # Of the fetches' own counts one is called wait_s too: what this step waited counts here.
    told = {**counts.PROCESS.as_dict(), "wait_s": round(wait_s, 3)}
    job.events.write("data_slow", step=job.state.step, **told)


def _evaluate(job: Job) -> None:
    if job.evaluate is None:
        return
    before_s = clock.now_s()
    metrics = job.evaluate(job.state.model, job.state.step)
    seconds = clock.now_s() - before_s
    job.recorder.outside(seconds, measuring=True)
    job.recorder.write(job.state.step, metrics)
    job.events.write("eval", step=job.state.step, seconds=round(seconds, 3), metrics=metrics)
    for hook in job.hooks:
        hook.on_eval(job, metrics)


def _back_to_the_last_good_step(job: Job, error: NotFinite, saved_step: int) -> None:
    """Put on record what was not finite, and save the step before, which ``train_step`` has left as it was. No older
    checkpoint is deleted for it: what led here may have begun earlier."""
    job.state.step, job.state.found_inf = error.step - 1, None
    job.events.write("not_finite", step=error.step, cause=error.cause, value=str(error.value))
    if job.state.step > saved_step:
        _save(job, must_succeed=False, keep=job.config.train.checkpoint.keep + 1)


def _save(job: Job, *, must_succeed: bool, keep: int | None = None) -> bool:
    """Whether it was saved. keep: this many checkpoints; absent, as the config says."""
    before_s = clock.now_s()
    step = job.state.step
    kept = keep or job.config.train.checkpoint.keep
    try:
        worlds.broadcast_from_rank0(job.folder.require_in_place)
        path = checkpoint.save(job.folder.checkpoints, step, job.tensors(), train_state(job), keep=kept)
    except RetryableError as error:
        job.events.write("checkpoint_failed", step=step, reason=error.message)
        if must_succeed:
            raise
        log.get("train").warning("%s; training goes on and saves again at the next turn", error.message)
        return False
    finally:
        job.recorder.outside(clock.now_s() - before_s)
    seconds = clock.now_s() - before_s
    job.recorder.write(step, {"ckpt/save_s": seconds, **({"ckpt/bytes": size_bytes(path)} if job.is_first else {})})
    job.events.write("checkpoint_saved", step=step, path=path, seconds=round(seconds, 3))
    for hook in job.hooks:
        hook.on_checkpoint(job, path)
    return True


def train_state(job: Job) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors."""
    return {
        "step": job.state.step,
        "tokens": job.recorder.tokens,
        "train_s": job.recorder.train_s,
        "val_s": job.recorder.val_s,
        "stream": job.batches.state(job.state.step),
    }


def _leave(job: Job, stop: Stop) -> None:
    step = job.state.step
    if stop == Stop.NONE or step == job.total_steps:
        job.events.write("run_finished", step=step)
        job.status("done")
        return
    job.status("interrupted" if stop == Stop.INTERRUPTED else "stopped")
    job.events.write("stopped", step=step, reason=stop.name.lower())
    what = "with a checkpoint saved" if step else "before the first"
    text = f"stopped at step {step} of {job.total_steps} {what}"
    hint = "run the same command again to go on"
    raise worlds.on_all_ranks((Interrupted if stop == Stop.INTERRUPTED else RetryableError)(text, hint=hint))


def _of_data(job: Job) -> dict[str, float]:
    """Tokens of each source, and what fetching them has cost."""
    by_source = getattr(job.batches, "tokens_by_source", None)
    tokens = {} if by_source is None else by_source(job.state.step)
    epochs = getattr(job.batches, "epochs", None)
    fetched = counts.PROCESS.as_dict() if counts.PROCESS["requests"] + counts.PROCESS["cache_hits"] else {}
    return {
        **({} if epochs is None else {"time/epoch": epochs(job.state.step)}),
        **{f"data/mix/{name}/tokens": float(n) for name, n in tokens.items()},
        **{f"data/fetch/{name}": amount for name, amount in fetched.items()},
    }


def _cadences(job: Job) -> tuple[str, str, str]:
    train = job.config.train
    return train.checkpoint.every, train.eval_every, train.log_every
