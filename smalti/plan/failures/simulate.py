"""Simulate a run with failures many times: the effect of chance, of few spare nodes and of bursts of failures.

Work and checkpoints are as in ``plan/failures/goodput.py``, whose mean results with exponential gaps and enough spares.
A failure also costs the wait for a spare node; a waiting job does not fail. Not modelled: idle spares that fail,
failures of several nodes, planned pauses.
"""

import heapq
import math
import random
from bisect import bisect
from dataclasses import dataclass, field, fields
from itertools import accumulate

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.cost.failures import DAY_S
from smalti.plan.failures import goodput
from smalti.plan.failures.causes import Cause
from smalti.plan.failures.setup import Setup

MAX_FAILURES = 5_000_000
"""Limit of failures over all repeats, which take some minutes to simulate."""


@dataclass
class Run:
    """Times of one simulated run, in seconds of the whole job."""

    useful_s: float = 0.0
    """Useful work."""
    stall_s: float = 0.0
    """Stalls of checkpoints that counted, and the upload of the last one."""
    redone_s: float = 0.0
    """Work lost by failures."""
    detect_s: float = 0.0
    restart_s: float = 0.0
    wait_s: float = 0.0
    """Waiting for spare nodes."""
    waits: int = 0
    """Number of waits."""
    failures: dict[str, int] = field(default_factory=dict)
    """Cause -> number of failures."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Cause -> time of redone work, detection, restart and waiting."""
    most_in_repair: int = 0
    """Largest number of nodes in repair at a time."""
    in_repair: dict[int, int] = field(default_factory=dict)
    """Nodes in repair at a failure -> number of failures."""

    @property
    def total_s(self) -> float:
        """Time from the first step to the last checkpoint."""
        return self.useful_s + self.stall_s + self.redone_s + self.detect_s + self.restart_s + self.wait_s

    @property
    def goodput_frac(self) -> float:
        """Share of the time that is useful work."""
        return self.useful_s / self.total_s


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of a quantity over the repeats."""

    mean: float
    error: float
    """Standard error of the mean."""
    low: float
    """5th percentile."""
    median: float
    high: float
    """95th percentile."""

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Return the spread of the values of the repeats."""
        ordered, n = sorted(values), len(values)
        mean = math.fsum(values) / n
        variance = math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1)
        return cls(mean, math.sqrt(variance / n), *(ordered[math.ceil(frac * n) - 1] for frac in (0.05, 0.5, 0.95)))


def simulate(setup: Setup, *, repeats: int, seed: int = 0, burst: float = 1.0) -> list[Run]:
    """Simulate ``setup`` ``repeats`` times; equal seeds give equal results on every machine.

    ``burst``: shape of the Weibull distribution of the gaps between failures, their mean unchanged: 1 is exponential,
    less gives bursts (many short gaps, few long ones). Raises UserError if the simulation would take too long.
    """
    if setup.days is None:
        raise UserError("a simulation needs the length of the run", hint="days=90")
    for name, value, low, high in (("repeats", repeats, 1, 1_000_000), ("burst", burst, 0.2, 5)):
        if not low <= value <= high:
            raise UserError(f"{name}={value} is out of range", allowed=f"a number from {low} to {high}")
    mean = setup.mtbf_s
    per_run = setup.days * DAY_S / mean / goodput.goodput_frac(setup.timing) if math.isfinite(mean) else 0.0
    if per_run * repeats > MAX_FAILURES:
        raise UserError(
            f"{repeats} runs of {per_run:,.0f} failures are too many to simulate",
            allowed=f"{MAX_FAILURES:,} failures in all",
            hint=f"--repeats {int(MAX_FAILURES / per_run)}, or fewer days" if per_run <= MAX_FAILURES else "fewer days",
        )
    return [_Simulation(setup, random.Random(derive_key("simulate", seed, n)), burst).run() for n in range(repeats)]


class _Simulation:
    """The state of one simulated run: the clock, the nodes in repair, and the losses so far."""

    def __init__(self, setup: Setup, draw: random.Random, burst: float) -> None:
        assert setup.days is not None
        self.setup, self.draw, self.burst = setup, draw, burst
        self.work_s, self.interval_s = setup.days * DAY_S, setup.interval_s
        self.scale_s = setup.mtbf_s / math.gamma(1 + 1 / burst)
        self.bounds = list(accumulate(cause.n for cause in setup.causes))
        self.now_s, self.done = 0.0, Run()
        self.repairs: list[float] = []

    def run(self) -> Run:
        """Simulate from the first step to the last checkpoint."""
        gap_s = self._gap()
        while True:
            failed_after_s = self._attempt(gap_s)
            if failed_after_s is None:
                return self.done
            gap_s = self._recover(failed_after_s)

    def _attempt(self, gap_s: float) -> float | None:
        """Work until the failure in ``gap_s``; return the time of lost work, or None if the run is done before.

        An attempt alternates ``interval_s`` of work and a stall; a checkpoint counts ``checkpoint_upload_s`` after it.
        """
        setup, done = self.setup, self.done
        left_s = self.work_s - done.useful_s
        segments = max(1, math.ceil(left_s / self.interval_s - 1e-9))
        saving_s = segments * setup.checkpoint_stall_s + setup.checkpoint_upload_s
        if gap_s >= left_s + saving_s:
            done.useful_s, done.stall_s = self.work_s, done.stall_s + saving_s
            self.now_s += left_s + saving_s
            return None
        length_s = self.interval_s + setup.checkpoint_stall_s
        saved = max(0, min(segments - 1, math.floor((gap_s - setup.checkpoint_upload_s) / length_s)))
        done.useful_s += saved * self.interval_s
        done.stall_s += saved * setup.checkpoint_stall_s
        done.redone_s += gap_s - saved * length_s
        self.now_s += gap_s
        return gap_s - saved * length_s

    def _recover(self, redone_s: float) -> float:
        """Recover from a failure; return the time from the next step to the next failure.

        With ``failures_during_restart`` a failure in the meantime starts the recovery over.
        """
        setup, done = self.setup, self.done
        while True:
            cause, gap_s = self._cause(), self._gap()
            detect_s = setup.detect_s if cause.detect_s is None else cause.detect_s
            restart_s = setup.restart_s if cause.restart_s is None else cause.restart_s
            wait_s = self._replace(cause, self.now_s + detect_s)
            up_s = detect_s + restart_s
            struck = setup.failures_during_restart and gap_s < up_s
            spent_s = gap_s if struck else up_s
            if spent_s < detect_s:
                wait_s = 0.0  # the failure came before a spare was needed
            done.detect_s += min(spent_s, detect_s)
            done.restart_s += max(0.0, spent_s - detect_s)
            done.wait_s += wait_s
            done.waits += wait_s > 0
            done.failures[cause.name] = done.failures.get(cause.name, 0) + 1
            done.lost_s[cause.name] = done.lost_s.get(cause.name, 0.0) + redone_s + spent_s + wait_s
            self.now_s += spent_s + wait_s
            redone_s = 0.0
            if not struck:
                return gap_s - up_s if setup.failures_during_restart else gap_s

    def _replace(self, cause: Cause, detected_s: float) -> float:
        """Send a lost node to repair; return how long the job waits until it has all its nodes."""
        days = cause.repair_days or self.setup.repair_days
        if days is None:
            return 0.0
        while self.repairs and self.repairs[0] <= self.now_s:
            heapq.heappop(self.repairs)
        done, in_repair = self.done, len(self.repairs)
        done.in_repair[in_repair] = done.in_repair.get(in_repair, 0) + 1
        if cause.loses_node:
            heapq.heappush(self.repairs, detected_s + days * DAY_S)
        done.most_in_repair = max(done.most_in_repair, len(self.repairs))
        if self.setup.spares is None:
            return 0.0
        missing = len(self.repairs) - self.setup.spares
        return max(0.0, heapq.nsmallest(missing, self.repairs)[-1] - detected_s) if missing > 0 else 0.0

    def _gap(self) -> float:
        """Draw the time to the next failure."""
        if math.isinf(self.scale_s):
            return math.inf
        return self.draw.weibullvariate(self.scale_s, self.burst)

    def _cause(self) -> Cause:
        """Draw a cause in proportion to the counts."""
        return self.setup.causes[bisect(self.bounds, self.draw.randrange(self.bounds[-1]))]


@dataclass(frozen=True)
class SimulationSummary:
    """Means and spreads over the repeats."""

    repeats: int
    goodput_frac: Spread
    calendar_days: Spread
    failures: Spread
    wait_h: Spread
    """Hours of waiting for a spare node."""
    waited_frac: float
    """Share of the repeats that waited at all."""
    most_in_repair_nodes: Spread
    shares: dict[str, float]
    """Part -> share of all hours: useful, stall, redone, detect, restart, wait."""
    failures_by_cause: dict[str, float]
    """Cause -> failures of a run, on average; the most frequent first."""
    lost_h_by_cause: dict[str, float]
    """Cause -> hours that the job loses in a run, on average."""


def summary(runs: list[Run]) -> SimulationSummary:
    """Return means and spreads over ``runs``."""
    n, total_s = len(runs), math.fsum(run.total_s for run in runs)
    parts = [part.name for part in fields(Run) if part.name.endswith("_s") and part.name != "lost_s"]
    count: dict[str, float] = {}
    lost: dict[str, float] = {}
    for run in runs:
        for name, times in run.failures.items():
            count[name] = count.get(name, 0.0) + times / n
            lost[name] = lost.get(name, 0.0) + run.lost_s[name] / 3600 / n
    names = sorted(count, key=lambda name: (-count[name], name))
    return SimulationSummary(
        repeats=n,
        goodput_frac=Spread.of([run.goodput_frac for run in runs]),
        calendar_days=Spread.of([run.total_s / DAY_S for run in runs]),
        failures=Spread.of([float(sum(run.failures.values())) for run in runs]),
        wait_h=Spread.of([run.wait_s / 3600 for run in runs]),
        waited_frac=sum(run.waits > 0 for run in runs) / n,
        most_in_repair_nodes=Spread.of([float(run.most_in_repair) for run in runs]),
        shares={part[: -len("_s")]: math.fsum(getattr(run, part) for run in runs) / total_s for part in parts},
        failures_by_cause={name: count[name] for name in names},
        lost_h_by_cause={name: lost[name] for name in names},
    )
