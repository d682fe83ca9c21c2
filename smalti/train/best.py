"""Keeps the checkpoint with the best value of an evaluated metric, besides the newest ones.

Only steps that are both evaluated and saved are compared. ``checkpoints/best`` names the checkpoint; it is not deleted,
and ``smalti export`` takes it.
"""

import math
from collections.abc import Mapping

from smalti.base import log, store
from smalti.base.errors import UserError
from smalti.config.run import JobConfig
from smalti.track.checkpoint_names import BEST, best
from smalti.track.sinks.jsonl import read_metrics
from smalti.train.hooks import Hook
from smalti.train.loop import Job


def watch(config: JobConfig) -> list[Hook]:
    """Return the hook; none without ``train.checkpoint.best``."""
    metric = config.train.checkpoint.best
    return [] if metric is None else [KeepBest(metric)]


class KeepBest(Hook):
    """Writes ``checkpoints/best`` on rank 0 when a saved step has the lowest value so far."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._values: dict[int, float] = {}
        self._saved: set[int] = set()

    def on_start(self, job: Job) -> None:
        """Read the value of the best checkpoint before this attempt; warn if nothing measures one."""
        if job.evaluate is None and job.is_first:
            log.get("train").warning(
                "train.checkpoint.best=%s has no effect: nothing is held out; export takes the newest checkpoint",
                self._metric,
            )
        step = best(job.folder.checkpoints)
        if step is None:
            return
        for row in read_metrics(job.folder.path):
            if row.get("step") == step and row.get(self._metric) is not None:
                self._values[step], self._saved = float(row[self._metric]), {step}

    def on_eval(self, job: Job, metrics: Mapping[str, float]) -> None:
        """Compare, if this step is saved already. Raises UserError where the evaluation has no such metric."""
        if self._metric in metrics:
            self._values[job.state.step] = metrics[self._metric]
            self._write(job)
        elif any(name.startswith("metrics/eval/") for name in metrics):
            raise UserError(
                f"train.checkpoint.best={self._metric} is not measured",
                allowed=", ".join(sorted(name for name in metrics if name.startswith("metrics/eval/"))),
                hint="a name of this list, or of a set in data.heldout",
            )

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Compare, if this step is evaluated already."""
        self._saved.add(job.state.step)
        self._write(job)

    def _write(self, job: Job) -> None:
        step = job.state.step
        if step not in self._saved or not math.isfinite(self._values.get(step, math.nan)):
            return
        others = [value for saved, value in self._values.items() if saved in self._saved and saved != step]
        if job.is_first and all(self._values[step] < value for value in others):
            store.write_text(job.folder.checkpoints / BEST, f"step-{step:08d}\n")
            job.events.write("checkpoint_best", step=step, metric=self._metric, value=self._values[step])
