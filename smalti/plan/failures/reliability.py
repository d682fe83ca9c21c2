"""Reliability of a run: expected failures, goodput, cost and spare nodes.

Expectations follow the closed form of ``plan/failures/goodput.py``; intervals are the spread of one run at a known
rate. ``goodput_by_rate`` shows the uncertainty of the rate itself; waiting for spares is in
``plan/failures/simulate.py``.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from smalti.base.errors import UserError
from smalti.base.units import format_seconds
from smalti.cost import failures
from smalti.cost.failures import DAY_S
from smalti.plan.failures import goodput
from smalti.plan.failures.causes import DAYS, GPUS, UNEXPECTED, node_loss_frac
from smalti.plan.failures.goodput import Shares, Timing
from smalti.plan.failures.rates import RATES, SMALL_JOB_GPUS, SMALL_JOB_MEASURED_H, SMALL_JOB_SCALED_H
from smalti.plan.failures.setup import ASSUMED, CAUSES_SOURCE, NAMES, Setup


@dataclass(frozen=True)
class Outlook:
    """The expected figures. Days, hours and dollars are None where ``days`` or a price is not given."""

    setup: Setup
    mtbf_s: float
    failures_per_day: float
    """Failures of a day during which the job is up."""
    interval_s: float
    """Checkpoint interval that is used."""
    young_s: float
    """Checkpoint interval by Young's formula."""
    daly_s: float
    """Checkpoint interval by Daly's formula."""
    optimal_s: float | None
    """Exact optimum of the checkpoint interval; None without stalls or without failures."""
    shares: Shares
    """Shares of the hours by use."""
    other_goodput_frac: float
    """Goodput with ``failures_during_restart`` inverted."""
    calendar_days: float | None
    failures: float | None
    """Expected number in the run."""
    failures_interval: tuple[int, int] | None
    """Range of 95 % of runs at this rate."""
    goodput_interval_frac: tuple[float, float] | None
    """Goodput at the ends of ``failures_interval``, the lower first."""
    gpu_hours: float | None
    """GPU-hours of the job, without spares."""
    cost_usd: float | None
    """Cost of ``gpu_hours``."""
    spares_cost_usd: float | None
    """Cost of the spares for the same time; None without spares or price."""
    spares_p99_nodes: int | None
    """Spares that suffice 99 % of the time if every failure takes its node away."""
    spares_p99_by_cause_nodes: int | None
    """The same if only the causes with ``loses_node`` do."""

    @property
    def lost_gpu_hours(self) -> dict[str, float] | None:
        """GPU-hours that are not useful work, by kind."""
        if self.gpu_hours is None:
            return None
        hours = self.gpu_hours
        return {name[: -len("_frac")]: share * hours for name, share in asdict(self.shares).items()
                if name != "useful_frac"}  # fmt: skip

    @property
    def lost_gpu_hours_by_cause(self) -> dict[str, float] | None:
        """GPU-hours redone, in detection and in restarts, by the cause of the failure."""
        if self.gpu_hours is None:
            return None
        timing = self.setup.timing
        down_s = [
            goodput.downtime_s(replace(timing, recoveries=(replace(each, frac=1.0),))) for each in timing.recoveries
        ]
        redone_frac = self.shares.redone_frac
        down_frac = self.shares.detect_frac + self.shares.restart_frac
        weights = [recovery.frac * time_s for recovery, time_s in zip(timing.recoveries, down_s, strict=True)]
        total = sum(weights) or 1.0
        return {
            cause.name: self.gpu_hours * (recovery.frac * redone_frac + weight / total * down_frac)
            for cause, recovery, weight in zip(self.setup.causes, timing.recoveries, weights, strict=True)
        }


def outlook(setup: Setup) -> Outlook:
    """Return the expected figures of ``setup``. Raises UserError if the job makes no progress."""
    mean, stall, timing = setup.mtbf_s, setup.checkpoint_stall_s, setup.timing
    shares = goodput.shares(timing)
    if shares.useful_frac < 1e-6:
        raise UserError(
            f"the job makes no progress: it fails every {mean:.3g} s, is down for {goodput.downtime_s(timing):.3g} s "
            f"each time and saves every {setup.interval_s:.3g} s",
            hint="fewer GPUs, a shorter restart_s, or another checkpoint_interval_s",
        )
    days = None if setup.days is None else setup.days / shares.useful_frac
    down_s = goodput.downtime_s(replace(timing, restarts_fail=False))
    cycle_s = mean if setup.failures_during_restart else mean + down_s
    expected = None if days is None else days * DAY_S / cycle_s
    counted = None if expected is None else goodput.poisson_interval(expected)
    hours = None if days is None else days * 24 * setup.gpus
    price = setup.price_usd_per_gpu_hour
    spare_gpus = setup.spares * setup.gpus_per_node if setup.spares else 0
    every, some = _spares(setup)
    return Outlook(
        setup=setup,
        mtbf_s=mean,
        failures_per_day=DAY_S / mean,
        interval_s=timing.interval_s,
        young_s=goodput.young_s(stall, mean),
        daly_s=goodput.daly_s(stall, mean),
        optimal_s=failures.optimal_s(stall, mean) if stall and math.isfinite(mean) else None,
        shares=shares,
        other_goodput_frac=goodput.goodput_frac(replace(timing, restarts_fail=not timing.restarts_fail)),
        calendar_days=days,
        failures=expected,
        failures_interval=counted,
        goodput_interval_frac=_goodput_between(timing, expected, counted),
        gpu_hours=hours,
        cost_usd=None if hours is None or price is None else hours * price,
        spares_cost_usd=None if days is None or price is None or not spare_gpus else days * 24 * spare_gpus * price,
        spares_p99_nodes=every,
        spares_p99_by_cause_nodes=some,
    )


def _spares(setup: Setup) -> tuple[int | None, int | None]:
    """Return the spares that suffice 99 % of the time if every failure takes its node, and if only some causes do."""
    if setup.repair_days is None:
        return None, None
    per_node_day = setup.failures_per_1000_gpu_days * setup.gpus / setup.nodes / 1000
    lost = [(cause.n, cause.repair_days or setup.repair_days) for cause in setup.causes if cause.loses_node]
    total = sum(n for n, _ in lost)
    mean_days = sum(n * days for n, days in lost) / total if total else 0.0
    return (
        goodput.spare_nodes(setup.nodes, per_node_day, setup.repair_days),
        goodput.spare_nodes(setup.nodes, per_node_day * node_loss_frac(setup.causes), mean_days),
    )


def _goodput_between(
    timing: Timing, expected: float | None, counted: tuple[int, int] | None
) -> tuple[float, float] | None:
    """Return the goodput at the ends of the interval of failures, the lower first."""
    if not expected or counted is None:
        return None
    few, many = (replace(timing, mtbf_s=timing.mtbf_s * expected / n if n else math.inf) for n in counted)
    return goodput.goodput_frac(many), goodput.goodput_frac(few)


def warnings(expected: Outlook) -> list[str]:
    """Return warnings about the figures."""
    setup, notes = expected.setup, []
    if setup.gpus <= SMALL_JOB_GPUS:
        factor = SMALL_JOB_SCALED_H / SMALL_JOB_MEASURED_H
        worse = goodput.goodput_frac(replace(setup.timing, mtbf_s=expected.mtbf_s / factor))
        notes.append(
            f"small jobs fail more often than 1/N says: jobs of {SMALL_JOB_GPUS} GPUs on Meta's RSC-1 failed every "
            f"{SMALL_JOB_MEASURED_H} h, not {SMALL_JOB_SCALED_H} h (software, storage, people); at {factor:.1f} times "
            f"the rate goodput is {worse * 100:.1f}%"
        )
    mean_h = DAYS * 24 / UNEXPECTED
    if expected.shares.useful_frac < 0.9 and expected.mtbf_s / 3600 >= mean_h:
        notes.append(
            f"lower than others report: Llama 3 405B was more than 90% effective on {GPUS:,} GPUs that failed every "
            f"{mean_h:.1f} h (arXiv 2407.21783)"
        )
    down = goodput.downtime_s(setup.timing)
    if down > expected.mtbf_s:
        notes.append(
            "the job is down for longer than it is up: detection and restart take longer than the time between failures"
        )
    best = expected.optimal_s
    if best is not None and setup.checkpoint_interval_s is not None:
        tuned = goodput.goodput_frac(replace(setup.timing, interval_s=max(best, setup.checkpoint_upload_s)))
        if tuned - expected.shares.useful_frac > 0.005:
            notes.append(
                f"a checkpoint every {format_seconds(best)} of work would give a goodput of {tuned * 100:.1f}%"
            )
    enough = expected.spares_p99_by_cause_nodes
    if setup.spares is not None and enough is not None and setup.spares < enough:
        notes.append(
            f"{setup.spares} spares are fewer than the {enough} that suffice 99% of the time: the job will wait for "
            "repairs, which only --simulate counts"
        )
    if not setup.failures_per_1000_gpu_days:
        notes.append("these figures assume no failures")
    return notes


def goodput_at(setup: Setup, *, gpus: int, failures_per_1000_gpu_days: float) -> float:
    """Return the goodput of the job on other GPUs or at another rate, at its optimal interval unless one is given."""
    mean = failures.mtbf_s(failures_per_1000_gpu_days, gpus)
    interval = setup.checkpoint_interval_s
    if interval is None:
        interval = max(failures.optimal_s(setup.checkpoint_stall_s, mean), setup.checkpoint_upload_s)
    return goodput.goodput_frac(replace(setup.timing, mtbf_s=mean, interval_s=interval))


def goodput_by_rate(setup: Setup) -> dict[str, float]:
    """Return the goodput of the job at each published rate."""
    return {
        rate.name: goodput_at(setup, gpus=setup.gpus, failures_per_1000_gpu_days=rate.per_1000_gpu_days)
        for rate in RATES
    }


def to_json(expected: Outlook) -> dict[str, Any]:
    """Return a JSON object with units in the names; unknown and infinite values are null."""
    setup = expected.setup
    pair = expected.shares.useful_frac, expected.other_goodput_frac
    with_during, without = pair if setup.failures_during_restart else pair[::-1]
    return {
        **{name: getattr(setup, name) for name in NAMES},
        "assumed": {name: {"value": ASSUMED[name][0], "source": ASSUMED[name][1]} for name in setup.assumed},
        "causes_source": CAUSES_SOURCE,
        "nodes": setup.nodes,
        "mtbf_s": _finite(expected.mtbf_s),
        "failures_per_day": expected.failures_per_day,
        "failures": expected.failures,
        "failures_interval": expected.failures_interval,
        "checkpoint_interval_s": expected.interval_s,
        "young_s": _finite(expected.young_s),
        "daly_s": _finite(expected.daly_s),
        "optimal_s": expected.optimal_s,
        "goodput_frac": expected.shares.useful_frac,
        "goodput_interval_frac": expected.goodput_interval_frac,
        "goodput_with_failures_during_restart_frac": with_during,
        "goodput_without_failures_during_restart_frac": without,
        "goodput_by_rate_frac": goodput_by_rate(setup),
        "shares": asdict(expected.shares),
        "calendar_days": expected.calendar_days,
        "gpu_hours": expected.gpu_hours,
        "lost_gpu_hours": expected.lost_gpu_hours,
        "lost_gpu_hours_by_cause": expected.lost_gpu_hours_by_cause,
        "cost_usd": expected.cost_usd,
        "cost_without_failures_usd": expected.cost_usd and expected.cost_usd * expected.shares.useful_frac,
        "spares_cost_usd": expected.spares_cost_usd,
        "spares_p99_nodes": expected.spares_p99_nodes,
        "spares_p99_by_cause_nodes": expected.spares_p99_by_cause_nodes,
        "warnings": warnings(expected),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
