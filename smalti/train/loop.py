"""The training loop: steps, and between them logs, evaluations, checkpoints and stops.

    resume -> [ batch -> step -> log? -> save? -> evaluate? -> stop? ] ... -> last save and evaluation

All ranks run the same loop and vote on conditions that they may see differently, so they enter every collective
together. A step begins when all ranks have its batch; while they wait, they vote on a stop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from smalti.base import clock, log
from smalti.base.errors import Interrupted, Preempted, RetryableError, UserError
from smalti.config.durations import RunLength
from smalti.config.run import JobConfig
from smalti.data.fetch.counts import Counts
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.group.world import RaisedOnAllRanks
from smalti.track.progress import Phase
from smalti.track.run import RunFolder
from smalti.track.sinks.feed import Events
from smalti.train.batches import Batches, TokenBatches
from smalti.train.cadence import Cadence
from smalti.train.evaluations import Evaluations
from smalti.train.frozen_origins import Identities
from smalti.train.garbage_collection import GarbageCollection
from smalti.train.hooks import Hook, closing_hooks, wait_for_hooks
from smalti.train.oom import Reporter
from smalti.train.read_ahead import ReadAhead
from smalti.train.recorder import NotFinite, Recorder
from smalti.train.saving import Saving
from smalti.train.signals import Stop, StopSignals
from smalti.train.step import Loss, TrainState, train_step
from smalti.train.vote import Vote

Evaluate = Callable[[nn.Module, int], dict[str, float]]
"""(model, step) -> metrics; called on every rank at the same step."""

_DATA_WAIT_WARN_S = 1.0
"""A step that waits longer than this for its data, in seconds, gives a warning."""
_WARN_EVERY_S = 60.0
"""Seconds between two such warnings."""
_VOTE_EVERY_S = 0.5
"""Seconds between two votes on a stop while ranks wait for data."""
READ_THREADS = 8
"""Maximum number of batches to read concurrently, where a store's latency requires it."""


@dataclass
class Job:
    """All that ``fit`` needs; built by ``train.job.build``."""

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
    """Function that returns the tensors of a checkpoint by name."""
    mesh: Mesh
    """The device mesh: the ranks along the axes of parallelism."""
    hosts: tuple[str, ...] = ()
    """The host of each rank; empty in a world of one."""
    evaluate: Evaluate | None = None
    """Measures held-out loss."""
    evaluate_tasks: Evaluate | None = None
    """Runs the tasks of ``evals``."""
    tasks_every: str | None = None
    """How often: in steps, tokens or a fraction of the run; required with ``evaluate_tasks``."""
    hooks: Sequence[Hook] = field(default_factory=tuple)
    microbatch_tokens: int | None = None
    """Tokens in one forward pass on one rank (whole rows); None for batches of the caller."""
    indexes: Mapping[str, bytes] = field(default_factory=dict)
    """Indexes that rank 0 has read (``data.stream.inputs.read_inputs``); empty for batches of the caller."""
    prefetch_s: float = 10.0
    """Seconds of training to read ahead."""
    prefetch_bytes: int = 1 << 30
    out_of_memory: Reporter | None = None
    """Reports a step that ran out of memory; None: its error is raised unchanged."""
    frozen: Identities = field(default_factory=dict)
    """Origins of the weights that are read on every attempt and never trained."""
    compiles_first: bool = False
    """The next step compiles the model."""
    trial_steps: int | None = None
    """Number of steps of a trial run, which then ends as a whole run does; None: not a trial."""

    @property
    def total_steps(self) -> int:
        """Number of steps of the run, or of its trial."""
        return min(self.length.total_steps, self.trial_steps or self.length.total_steps)

    def status(self, state: str) -> None:
        """Write the run's state and heartbeat (rank 0)."""
        if self.is_first:
            self.folder.set_status(state, step=self.state.step)


def fit(job: Job) -> None:
    """Train until the end of the run.

    Raises Preempted (exit 75) after SIGTERM and Interrupted (exit 130) after Ctrl-C, both with a checkpoint saved;
    NotFinite (exit 3) where a loss or a gradient norm is not finite, with a checkpoint of the step before it.
    """
    if job.state.step >= job.total_steps:
        log.get("train").info("%s is finished: all %d steps are done", job.folder.path, job.state.step)
        with StopSignals() as signals, job.recorder, closing_hooks(job):
            Evaluations(job).run_at_start()
            stop = wait_for_hooks(job, signals, Vote(2))
            if stop:
                _end(job, stop)
            job.status("done")
        return
    loop = _Loop(job)
    job.status("running")
    with (
        StopSignals() as loop.signals,
        job.recorder,
        closing_hooks(job),
        loop.saving,
        _read_ahead(job) as loop.batches,
        GarbageCollection() as loop.garbage,
    ):
        loop.start()
        while not loop.is_over:
            loop.wait_for_batch()
            if not loop.agreed.stop:
                loop.step()
            loop.log_if_due()
            loop.save_if_due()
            loop.evaluate_if_due()
            loop.report_status_if_due()
        loop.end()


class _Agreed(NamedTuple):
    """Result of the last vote of all ranks."""

    stop: Stop = Stop.NONE
    save: bool = False
    evaluate: bool = False
    lacks_batch: bool = False
    """Some rank does not have its next batch yet."""
    is_writing: bool = False
    """Some rank still writes a checkpoint."""
    copy: bool = False
    """The state is to be copied to shared memory."""


class _Loop:
    """The stages of ``fit``, one method each, and the state they share between steps."""

    signals: StopSignals
    batches: ReadAhead[Any]
    garbage: GarbageCollection

    def __init__(self, job: Job) -> None:
        train = job.config.train
        self.job = job
        self.evaluations = Evaluations(job)
        self.agreed = _Agreed(lacks_batch=True)
        self._log_when = Cadence(train.log_every, job.length)
        self._status_when = Cadence("5s", job.length)
        self._vote = Vote(6)
        self.saving = Saving(job)
        self._save_when = Cadence(train.checkpoint.every, job.length, self.saving.interval_s)
        copies = train.checkpoint.peer_copies
        self._copy_when = None if copies is None else Cadence(copies, job.length)
        self._lacks_copy = False
        self._wait_began_s = 0.0
        self._is_first_wait = True
        self._warned_s = -math.inf

    @property
    def is_over(self) -> bool:
        """True after the last step, or after a vote for a stop."""
        return self._is_last or bool(self.agreed.stop)

    @property
    def _is_last(self) -> bool:
        return self.job.state.step >= self.job.total_steps

    def start(self) -> None:
        """Call the hooks and run the evaluations before the first step."""
        for hook in self.job.hooks:
            hook.on_start(self.job)
        self.evaluations.run_at_start()

    def wait_for_batch(self) -> None:
        """Return on all ranks together when each has its next batch, or when a stop was requested from any."""
        self._wait_began_s = clock.now_s()
        step, batches = self.job.state.step, self.job.batches
        row_tokens = batches.seq_len(step) if isinstance(batches, TokenBatches) else None
        self.job.state.progress.enter(Phase.DATA, step=step, row_tokens=row_tokens)
        self.garbage.collect_if_due(self.job.state.step + 1)
        while self.agreed.lacks_batch and not self.agreed.stop:
            began_s = clock.now_s()
            has_batch = self.batches.wait(_VOTE_EVERY_S)
            self.job.state.progress.wait_for_batch(not has_batch, clock.now_s() - began_s)
            self._vote.start(self.signals.requested, 0, 0, not has_batch, self.saving.is_writing)
            self._agree()

    def step(self) -> None:
        """Train one step; meanwhile the ranks vote on the actions after it."""
        upcoming = self.job.state.step + 1
        self._vote.start(
            self.signals.requested,
            self._save_when.due(upcoming),
            self.evaluations.heldout_is_due(upcoming),
            not self.batches.has(upcoming),
            self.saving.is_writing,
            self._copy_when is not None and self._copy_when.due(upcoming),
        )
        microbatches = next(self.batches)
        wait_s = clock.now_s() - self._wait_began_s
        self._warn_if_slow(wait_s)
        _run_step(self.job, microbatches, wait_s)
        self.job.state.progress.enter(Phase.OTHER, step=self.job.state.step)
        self._agree()

    def log_if_due(self) -> None:
        """Write the metrics of the steps since the last flush; also before a save, an evaluation or the end."""
        job, agreed = self.job, self.agreed
        evaluates = agreed.evaluate or self.evaluations.tasks_are_due
        saves = agreed.save or self._copies_now
        if not (self._log_when.due(job.state.step) or saves or evaluates or agreed.stop or self._is_last):
            return
        try:
            job.recorder.flush(job.batches.metrics(job.state.step) if isinstance(job.batches, TokenBatches) else {})
        except NotFinite as error:
            self._return_to_last_good_step(error)
            raise error from RaisedOnAllRanks("all ranks have the same loss and gradient norm")
        self._log_when.done()

    def evaluate_if_due(self) -> None:
        """Evaluate; also after the last step. A stop does not wait for it: the next attempt does it."""
        if self._is_last or not self.agreed.stop:
            self.evaluations.run(heldout=self.agreed.evaluate)

    def save_if_due(self) -> None:
        """Begin to save a checkpoint, or to copy the state to shared memory, and report one that is complete.

        After the last step and before a stop, save and wait for it; there a failure is raised. A copy that is due while
        a save runs is made after it.
        """
        must_succeed = bool(self.agreed.stop) or self._is_last
        if not (self.saving.is_running or self._lacks_save(must_succeed) or self._copies_now):
            return
        with self.job.state.progress.within(Phase.CHECKPOINT):
            if not self.agreed.is_writing:
                self.saving.finish()
            if self._lacks_save(must_succeed):
                self._save(must_succeed=must_succeed)
                self._save_when.done()
                self._copied()
                self.garbage.collect_all()
            elif self._copies_now:
                self.saving.copy_to_memory()
                self._copied()
            if must_succeed:
                self.saving.finish(must_succeed=True)

    @property
    def _copies_now(self) -> bool:
        """Whether the state is to be copied to shared memory alone: it is due, and no rank still writes."""
        return self._lacks_copy and not (self.agreed.is_writing or self.is_over)

    def _copied(self) -> None:
        self._lacks_copy = False
        if self._copy_when is not None:
            self._copy_when.done()

    def _lacks_save(self, must_succeed: bool) -> bool:
        return (self.agreed.save or must_succeed) and self.job.state.step != self.saving.step

    def _save(self, *, must_succeed: bool, extra: int = 0) -> None:
        try:
            self.saving.start(extra=extra, in_memory=not must_succeed)
        except RetryableError as error:
            self.saving.failed(self.job.state.step, error, must_succeed=must_succeed)

    def report_status_if_due(self) -> None:
        """Write the heartbeat."""
        if self._status_when.due(self.job.state.step):
            self.job.status("running")
            self._status_when.done()

    def end(self) -> None:
        """Call the hooks; report the end of the run, or raise the error of a stop."""
        self.job.state.progress.enter(Phase.END)
        stop = wait_for_hooks(self.job, self.signals, self._vote) if self._is_last else self.agreed.stop
        for hook in self.job.hooks:
            hook.on_stop(self.job)
        _end(self.job, stop)

    def _agree(self) -> None:
        stop, *agreed = self._vote.result()
        self.agreed = _Agreed(Stop(stop), *map(bool, agreed))
        self._lacks_copy |= self.agreed.copy

    def _warn_if_slow(self, wait_s: float) -> None:
        """Write a warning and an event if a step waited for its data; not for the first, which always waits."""
        is_first = self._is_first_wait
        self._is_first_wait = False
        if is_first or wait_s < _DATA_WAIT_WARN_S or clock.now_s() - self._warned_s < _WARN_EVERY_S:
            return
        self._warned_s = clock.now_s()
        step = self.job.state.step
        log.get("train").warning("step %d waited %.1f s for its data", step, wait_s)
        batches = self.job.batches
        counts = batches.fetch_counts() if isinstance(batches, TokenBatches) else Counts().as_dict()
        # replaces the count wait_s, the sum over threads, by the wait of this step
        self.job.events.write("data_slow", step=step, **{**counts, "wait_s": round(wait_s, 3)})

    def _return_to_last_good_step(self, error: NotFinite) -> None:
        """Return to the step before a non-finite one (weights are unchanged), write an event and save.

        No older checkpoint is deleted for this one, because the cause may be earlier.
        """
        job = self.job
        job.state.step = error.step - 1
        job.state.found_inf = None
        job.events.write("not_finite", step=error.step, cause=error.cause, value=str(error.value))
        self.saving.finish()
        if job.state.step > self.saving.step:
            self._save(must_succeed=False, extra=1)
            self.saving.finish()


def _read_ahead(job: Job) -> ReadAhead[Any]:
    """Return the reader of batches: for ``TokenBatches`` with several threads and of rows, which are smaller than
    tensors."""
    batches, first, last = job.batches, job.state.step, job.total_steps
    limits: Any = {"prefetch_s": job.prefetch_s, "prefetch_bytes": job.prefetch_bytes}
    if isinstance(batches, TokenBatches):
        return ReadAhead(batches.read, first, last, threads=READ_THREADS, interrupt=batches.close, **limits)
    return ReadAhead(batches.batch, first, last, **limits)


def _run_step(job: Job, microbatches: Any, wait_s: float) -> None:
    """Place the microbatches on the device, run one step, record its result and call the hooks."""
    if isinstance(job.batches, TokenBatches):
        microbatches = job.batches.place(microbatches)
    if not len(microbatches):
        raise UserError(
            f"batch({job.state.step}) of {type(job.batches).__name__} returned no microbatch",
            allowed="the same number on every rank, at least one",
            hint="for a rank without data: a microbatch whose loss and weight are 0",
        )
    step, lr = job.state.step, job.state.lr(job.state.step)
    try:
        with job.state.progress.within(Phase.COMPILE) if job.compiles_first else nullcontext():
            result = train_step(job.state, microbatches, job.loss)
        job.compiles_first = False
    except (RuntimeError, MemoryError) as error:
        if job.out_of_memory is None:
            raise
        phase = job.state.progress.phase.name.lower()
        memory_error = job.out_of_memory.report(error, job.batches, microbatches, step=step, phase=phase)
        if memory_error is None:
            raise
        raise memory_error from error
    job.recorder.add(job.state.step, lr, result, wait_s=wait_s)
    for hook in job.hooks:
        hook.on_step(job, result)


def _end(job: Job, stop: Stop) -> None:
    step = job.state.step
    if stop == Stop.NONE:
        job.events.write("run_finished", step=step)
        job.status("done")
        return
    job.status("interrupted" if stop == Stop.INTERRUPTED else "stopped")
    job.events.write("stopped", step=step, reason=stop.name.lower())
    saved = f"stopped at step {step} of {job.total_steps} with a checkpoint saved"
    text = saved if step else "stopped before the first step; nothing was saved"
    kind = Interrupted if stop == Stop.INTERRUPTED else Preempted
    cause = RaisedOnAllRanks("all ranks stop after the same step")
    raise kind(text, hint="run the same command again to continue") from cause
