"""Compare the plan of a run with what the run measured; reads no files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from smalti.base.errors import DataError
from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost import checkpoint as cost
from smalti.cost.flops import mfu
from smalti.plan.run_plan import RunPlan, plan_run

WARMUP_FRAC = 0.1
"""Share of the first logged steps that is left out of the medians."""


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured, in the unit of its name."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None if one is unknown."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the fields and the ratio."""
        return {**asdict(self), "ratio": self.ratio}


def verify(
    config: RunConfig,
    *,
    machine: Hardware | None,
    peak_flops_per_s: float | None,
    tokens_per_s: Sequence[float],
    tokens_learned: float | None = None,
    checkpoint_bytes: float | None = None,
    checkpoint_blocked_s: float | None = None,
    checkpoint_staging_bytes: float | None = None,
) -> list[Comparison]:
    """Compare ``config``'s plan with what its run logged.

    ``machine``: a rank's device; None: no times are predicted. ``peak_flops_per_s``: the peak of all ranks that the run
    recorded (published on CUDA, measured on CPU), on which both MFUs are based. ``tokens_per_s``: throughput of the
    logged steps, in order; medians leave the first tenth out. ``checkpoint_bytes``, ``checkpoint_blocked_s``,
    ``checkpoint_staging_bytes``: of the last save. Raises DataError without a logged step.
    """
    if not tokens_per_s:
        raise DataError("the run has not logged its throughput yet", hint="let it run for a few steps")
    plan = plan_run(config, machine=machine)
    settled = tokens_per_s[int(len(tokens_per_s) * WARMUP_FRAC) :]
    measured = median(settled)

    def utilisation(speed: float | None) -> float | None:
        if speed is None or peak_flops_per_s is None:
            return None
        return mfu(speed, plan.flops_per_token, peak_flops_per_s)

    return [
        Comparison("step_s", plan.step_s, plan.global_batch_tokens / measured if measured > 0 else None),
        Comparison("tokens_per_s", plan.tokens_per_s, measured),
        Comparison("mfu_frac", utilisation(plan.tokens_per_s), utilisation(measured)),
        Comparison("train_s", plan.total_s, plan.tokens / measured if measured > 0 else None),
        Comparison("tokens", float(plan.tokens), tokens_learned),
        Comparison("checkpoint_bytes", float(cost.checkpoint_bytes(config)), checkpoint_bytes),
        Comparison("checkpoint_blocked_s", _blocked_s(config, machine, plan), checkpoint_blocked_s),
        Comparison("checkpoint_staging_bytes", float(cost.staging_bytes(config)), checkpoint_staging_bytes),
    ]


def _blocked_s(config: RunConfig, machine: Hardware | None, plan: RunPlan) -> float | None:
    if machine is None or plan.step is None:
        return None
    return cost.blocked_s(config, machine, plan.step, on_gpu=machine.host_bytes_per_s is not None)
