"""Closed-form goodput of a run that fails and resumes: the checkpoint interval, where the hours go, spare nodes.

The expectations are exact for failures at a constant rate (exponential gaps), checkpoints that count ``upload_s`` after
their stall, and fixed detection and restart times; docs/concepts/plan/reliability.md derives them. Waiting for spare
nodes and bursts of failures are in ``plan/failures/simulate.py``; planned pauses are not included.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recovery:
    """Recovery of a job from one kind of failure."""

    detect_s: float
    """Time from the failure to the decision to restart."""
    restart_s: float
    """Time from that decision to the first step, including loading the checkpoint."""
    frac: float = 1.0
    """Share of the failures of this kind."""

    @property
    def whole_s(self) -> float:
        """Detection and restart."""
        return self.detect_s + self.restart_s


@dataclass(frozen=True)
class Timing:
    """Times of failures, checkpoints and recoveries of a job, in seconds; ``mtbf_s`` may be infinite."""

    mtbf_s: float
    """Mean time between failures of the whole job."""
    stall_s: float
    """Duration of the stall of training at each checkpoint."""
    interval_s: float
    """Work between two checkpoints; a failure loses all work since the newest checkpoint that counts."""
    recoveries: tuple[Recovery, ...]
    """Kinds of failures; their shares add up to 1."""
    upload_s: float = 0.0
    """Time from the end of the stall until the checkpoint counts (asynchronous saving)."""
    restarts_fail: bool = False
    """True if failures also occur while the job is down; the recovery then starts over."""


@dataclass(frozen=True)
class Shares:
    """Shares of a job's hours (0..1), which add up to 1."""

    useful_frac: float
    """Useful work: the goodput, also called ETTR."""
    stall_frac: float
    """Stalls of checkpoints that counted."""
    redone_frac: float
    """Lost work and stalls since the last checkpoint that counted."""
    detect_frac: float
    """Time from failures to the decision to restart."""
    restart_frac: float
    """Time from that decision to the first step."""


def downtime_s(timing: Timing) -> float:
    """Return the expected time from a failure to the first step after it.

    It is the mean R of detection + restart; with ``restarts_fail`` M (e^(R/M) - 1) (Daly 2006), for several kinds of
    failures M (1 - q) / q with q the mean of e^(-R/M), the probability of a recovery without a failure.
    """
    if not _recoveries_fail(timing):
        return sum(recovery.frac * recovery.whole_s for recovery in timing.recoveries)
    return _over_attempts(
        timing.mtbf_s
        * sum(recovery.frac * -math.expm1(-recovery.whole_s / timing.mtbf_s) for recovery in timing.recoveries),
        timing,
    )


def _detecting_s(timing: Timing) -> float:
    """Return the part of the downtime that is detection."""
    if not _recoveries_fail(timing):
        return sum(recovery.frac * recovery.detect_s for recovery in timing.recoveries)
    return _over_attempts(
        timing.mtbf_s
        * sum(recovery.frac * -math.expm1(-recovery.detect_s / timing.mtbf_s) for recovery in timing.recoveries),
        timing,
    )


def _recoveries_fail(timing: Timing) -> bool:
    return timing.restarts_fail and math.isfinite(timing.mtbf_s)


def _over_attempts(time_s: float, timing: Timing) -> float:
    """Convert the time of one attempt at recovery to that of all until one succeeds; infinite if none can."""
    success_frac = sum(recovery.frac * math.exp(-recovery.whole_s / timing.mtbf_s) for recovery in timing.recoveries)
    return time_s / success_frac if success_frac else math.inf


def shares(timing: Timing) -> Shares:
    """Return where the hours go in the long run.

    An attempt lives M on average and leaves E[n] = e^(-U/M) / (e^(L/M) - 1) checkpoints that count, L = tau + C:
    goodput = tau E[n] / (M + D). With U = 0 this is tau / [(M + D) (e^((tau + C)/M) - 1)].
    """
    mean, length = timing.mtbf_s, timing.interval_s + timing.stall_s
    if math.isinf(mean):
        return Shares(timing.interval_s / length, timing.stall_s / length, 0.0, 0.0, 0.0)
    # e^(-x) of a large x is 0; e^x would overflow
    saved = math.exp(-(timing.upload_s + length) / mean) / -math.expm1(-length / mean)
    down = downtime_s(timing)
    cycle, detect = mean + down, _detecting_s(timing)
    if math.isinf(cycle):
        return Shares(0.0, 0.0, 0.0, 0.0, 1.0)
    return Shares(
        useful_frac=timing.interval_s * saved / cycle,
        stall_frac=timing.stall_s * saved / cycle,
        redone_frac=max(0.0, mean - length * saved) / cycle,
        detect_frac=detect / cycle,
        restart_frac=max(0.0, down - detect) / cycle,
    )


def goodput_frac(timing: Timing) -> float:
    """Return the share of the hours that is useful work (0..1)."""
    return shares(timing).useful_frac


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return the checkpoint interval sqrt(2 C M): first order, good while C is far below M (Young 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return the checkpoint interval of higher order (Daly 2006); M if C is 2 M or more."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - stall_s


def poisson_quantile(mean: float, frac: float) -> int:
    """Return the smallest n with P(count <= n) >= ``frac`` for a Poisson count of this mean."""
    if mean <= 0:
        return 0
    reach = 40 * math.sqrt(mean) + 40  # probabilities further from the mean are below float rounding
    n, last, total = max(0, int(mean - reach)), int(mean + reach), 0.0
    while True:
        total += math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))
        if total >= frac or n >= last:
            return n
        n += 1


def poisson_interval(mean: float, frac: float = 0.95) -> tuple[int, int]:
    """Return the interval that contains a Poisson count of this mean with at least probability ``frac``."""
    tail = (1 - frac) / 2
    return poisson_quantile(mean, tail), poisson_quantile(mean, 1 - tail)


def spare_nodes(nodes: int, failures_per_node_day: float, repair_days: float, frac: float = 0.99) -> int:
    """Return the spares that suffice a share ``frac`` of the time: a quantile of Poisson(nodes x rate x repair time).

    Nodes in repair are a Poisson count whatever the spread of repair times (M/G/infinity; Palm 1943), as long as every
    failure takes its node away and none is down for another reason.
    """
    return poisson_quantile(nodes * failures_per_node_day * repair_days, frac)
