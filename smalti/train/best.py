"""Keeps the checkpoint with the best value of an evaluated metric, besides the newest ones.

Only steps that are both evaluated and saved are compared. ``checkpoints/best`` names the checkpoint; it is not deleted,
and ``smalti export`` takes it.
"""

import math
from collections.abc import Mapping

from smalti.base import log, store
from smalti.base.errors import UserError
from smalti.config.run import JobConfig
from smalti.track.checkpoints.names import BEST, best, complete, step_of
from smalti.track.names import EVAL, EVAL_EMA
from smalti.track.sinks.jsonl import read_metrics
from smalti.train.hooks import Hook
from smalti.train.loop import Job


def watch(config: JobConfig) -> list[Hook]:
    """Return the hook; none without ``train.checkpoint.best``."""
    metric = config.train.checkpoint.best
    return [] if metric is None else [KeepBest(metric)]


class KeepBest(Hook):
    """Writes ``checkpoints/best`` on rank 0 when a saved step has a lower value than the best so far."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._values: dict[int, float] = {}
        """By step, the values of this attempt that no complete checkpoint had when they were measured."""
        self._best_value: float | None = None

    def on_start(self, job: Job) -> None:
        """Warn if nothing measures the metric."""
        if job.evaluate is None and job.is_first:
            log.get("train").warning(
                "train.checkpoint.best=%s has no effect: nothing is held out; export takes the newest checkpoint",
                self._metric,
            )
        step = job.state.step
        if (
            job.is_first and step and best(job.folder.checkpoints) != step
        ):  # the attempt before ended before it compared
            self._values[step] = self._recorded(job, step)
            self._compare(job, step)

    def on_eval(self, job: Job, metrics: Mapping[str, float]) -> None:
        """Compare, if this step is saved already. Raises UserError where the evaluation has no such metric."""
        if self._metric in metrics:
            self._values[job.state.step] = metrics[self._metric]
            self._compare(job, job.state.step)
        elif (measured := sorted(name for name in metrics if name.startswith((EVAL, EVAL_EMA)))) and not (
            job.state.step == 0 and job.config.train.ema is not None and self._metric.startswith(EVAL_EMA)
        ):  # at step 0 there is no moving average
            raise UserError(
                f"train.checkpoint.best={self._metric} is not measured",
                allowed=", ".join(measured),
                hint="a name of this list, or of a set in data.heldout",
            )

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Compare, if its step is evaluated already."""
        self._compare(job, step_of(path))

    def _compare(self, job: Job, step: int) -> None:
        """Write the step and its event, if it is evaluated, saved (also by an earlier attempt) and better."""
        folder, value = job.folder.checkpoints, self._values.get(step, math.nan)
        if not job.is_first or not math.isfinite(value) or step not in map(step_of, complete(folder)):
            return
        self._values = {other: value for other, value in self._values.items() if other > step}
        known = best(folder)
        if known is not None and known != step:
            if self._best_value is None:
                self._best_value = self._recorded(job, known)
            if value >= self._best_value:
                return
        self._best_value = value
        store.write_text(folder / BEST, f"step-{step:08d}\n")
        job.events.write("checkpoint_best", step=step, metric=self._metric, value=value)

    def _recorded(self, job: Job, step: int) -> float:
        """Return the value at a step of an earlier attempt; infinite if it is not in metrics.jsonl."""
        values = [
            row[self._metric]
            for row in read_metrics(job.folder.path)
            if row.get("step") == step and row.get(self._metric) is not None
        ]
        return float(values[-1]) if values else math.inf
