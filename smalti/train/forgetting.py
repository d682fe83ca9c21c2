"""Warns when held-out sets of ``data.retain`` get worse than their bounds, relative to before the first step."""

import math
from collections.abc import Mapping
from typing import Any

from smalti.base import log
from smalti.base.errors import UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.group import world
from smalti.track.report.continued import Change, percent, require_same_settings
from smalti.track.report.read import read_run
from smalti.train.hooks import Hook
from smalti.train.loop import Job


def watch(config: JobConfig) -> list[Hook]:
    """Return the hook; none without ``data.retain``."""
    return [Forgetting(config.data.retain)] if isinstance(config, RunConfig) and config.data.retain else []


class Forgetting(Hook):
    """Writes a warning and an event when a set exceeds its bound, a further multiple of it, or the bound again after a
    value below it. A resumed run derives its past warnings from ``metrics.jsonl``."""

    def __init__(self, retain: Mapping[str, float]) -> None:
        self._retain = retain
        self._before: dict[str, float] = {}
        self._warned: dict[str, float] = {}
        """Name -> multiples of the bound with a warning."""

    def on_start(self, job: Job) -> None:
        """Read past measurements. Raises UserError if they were measured with other settings, and if the job has no
        evaluation."""
        if job.evaluate is None:
            raise UserError(
                "data.retain has no effect: nothing measures the held-out sets in this job",
                allowed="data.retain with build(..., evaluate=...)",
                hint="evaluation=heldout_hook of smalti.evals.in_loop, as smalti train has it; or data.retain={}",
            )
        if job.state.step:
            self._before, self._warned = world.broadcast_from_rank0(lambda: self._on_record(job))

    def _on_record(self, job: Job) -> tuple[dict[str, float], dict[str, float]]:
        run = read_run(job.folder.path)
        require_same_settings(run, job.config.model_dump(mode="json"), list(self._retain))
        for row in run.rows:
            self._take(row["step"], row)
        for name in self._retain.keys() - self._before.keys():
            log.get("train").warning("data.retain: metrics.jsonl has no '%s' of step 0, so it is not watched", name)
        return self._before, self._warned

    def on_eval(self, job: Job, metrics: Mapping[str, float]) -> None:
        """Warn of the sets that are worse than their bounds."""
        for change in self._take(job.state.step, metrics):
            assert change.allowed_frac is not None
            if not job.is_first:
                continue
            log.get("train").warning(
                "step %d: held-out '%s' has changed by %s since step 0 (%.4f -> %.4f bits per byte); data.retain "
                "allows +%.3g %%. Raise its share in data.stages, or lower the learning rate",
                *(job.state.step, change.name, percent(change.worse_frac), change.before, change.after),
                change.allowed_frac * 100,
            )
            job.events.write(
                "forgetting",
                step=job.state.step,
                set=change.name,
                before=change.before,
                now=change.after,
                worse_frac=change.worse_frac,
                allowed_frac=change.allowed_frac,
            )

    def _take(self, step: int, metrics: Mapping[str, Any]) -> list[Change]:
        """Store a measurement; returns the changes to warn of."""
        changes = []
        for name, allowed_frac in self._retain.items():
            key = f"metrics/eval/{name}/bits_per_byte"
            if key not in metrics:
                continue
            value = math.nan if metrics[key] is None else float(metrics[key])
            if step == 0 and value > 0:
                self._before[name] = value
            if name not in self._before:
                continue
            change = Change(name, self._before[name], value, allowed_frac)
            before = self._warned.get(name, 0)
            if change.times_bound_exceeded > before:
                changes.append(change)
            self._warned[name] = max(before, change.times_bound_exceeded) if change.times_bound_exceeded else 0
        return changes
