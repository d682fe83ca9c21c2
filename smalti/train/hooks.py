"""Hooks: code that the training loop calls at fixed points, on every rank."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from smalti.train.cadence import Cadence
from smalti.train.signals import Stop, StopSignals
from smalti.train.step import StepResult
from smalti.train.vote import Vote

if TYPE_CHECKING:
    from smalti.train.loop import Job

_POLL_S = 0.25


class Hook:
    """Base class of hooks; all methods do nothing."""

    def on_start(self, job: "Job") -> None:
        """Called before the first step of this attempt."""

    def on_step(self, job: "Job", result: StepResult) -> None:
        """Called after each step. Reading a tensor of ``result`` waits for the device."""

    def on_eval(self, job: "Job", metrics: Mapping[str, float]) -> None:
        """Called after an evaluation; the metrics are the same on every rank."""

    def on_checkpoint(self, job: "Job", path: str) -> None:
        """Called after a checkpoint is complete."""

    def is_busy(self, job: "Job") -> bool:
        """Return whether the end of the run must wait for this hook, on this rank.

        Called repeatedly once all steps are done, also if they were done before this attempt; ``on_start`` was not
        called then.
        """
        return False

    def on_stop(self, job: "Job") -> None:
        """Called after the last step of this attempt, if it ends without an error."""

    def close(self, job: "Job") -> None:
        """Called at the end of this attempt, also after an error."""


@contextmanager
def closing_hooks(job: "Job") -> Iterator[None]:
    """Context manager: close all hooks at the end."""
    try:
        yield
    finally:
        for hook in job.hooks:
            hook.close(job)


def wait_for_hooks(job: "Job", signals: StopSignals, vote: Vote) -> Stop:
    """Wait on all ranks, once all steps are done, until no hook of any rank is busy.

    Returns the stop that was requested before that, if any.
    """
    heartbeat = Cadence("5s", job.length)
    while True:
        vote.start(signals.requested, any(hook.is_busy(job) for hook in job.hooks))
        stop, busy, *_ = vote.result()
        job.state.progress.beat()
        if not busy:
            return Stop.NONE
        if stop:
            return Stop(stop)
        if heartbeat.due(job.state.step):
            job.status("running")
            heartbeat.done()
        time.sleep(_POLL_S)
