"""Combines the scores of runs into a calibration: a row for each task, shot count and measure, and what to use.

A row is *well behaved* if the spread between runs is at least twice the noise and the scores improve with FLOPs by a
permutation test. All statistics of runs are of their last scores.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from smalti.base.errors import DataError, UserError
from smalti.config.identity import identity
from smalti.config.show import flatten
from smalti.cost.flops import FORMULA
from smalti.evals.calibration import signal as statistics
from smalti.evals.calibration.points import MEASURES, Point, RunScores, Variant, read_scores
from smalti.track.run import resolve

SNR_BOUND = 2.0
"""Least signal / noise: equal runs reach it by chance in about 1 % of rows (5 runs, 3 independent checkpoints)."""
LEVEL = 0.05
MIN_SCALES = 4
"""Fewest runs of different FLOPs with which the permutation test can reach ``LEVEL`` (1 order of 24)."""

Class = Literal["well behaved", "not better than noise", "poorly behaved"]
Group = Literal["well behaved", "given enough shots", "not better than noise", "poorly behaved"]


@dataclass(frozen=True)
class Row:
    """A measure of a task as it was asked, over all runs that have it."""

    variant: Variant
    measure: str
    chance: float | None
    points: Sequence[Sequence[Point]]
    """The points of each run, ascending in steps."""
    seeds: Sequence[Sequence[float]]
    """Last scores of runs that differ in nothing but the seed, at the same step."""
    last: int

    @cached_property
    def finals(self) -> list[Point]:
        """The last point of each run, ascending in FLOPs."""
        return sorted((points[-1] for points in self.points), key=lambda point: (point.flops, point.value))

    @cached_property
    def signal(self) -> float:
        """Standard deviation of the last scores over their mean."""
        return statistics.relative_std([point.value for point in self.finals])

    @cached_property
    def range(self) -> float:
        """Greatest difference of the last scores over their mean."""
        return statistics.relative_range([point.value for point in self.finals])

    @cached_property
    def checkpoint_noise(self) -> float | None:
        """Relative standard deviation over the last checkpoints, pooled over the runs that have as many."""
        groups = [[point.value for point in run[-self.last :]] for run in self.points if len(run) >= self.last]
        return statistics.pooled_std(groups) if groups else None

    @cached_property
    def seed_noise(self) -> float | None:
        """Relative standard deviation between seeds, pooled; None where no runs differ in the seed alone."""
        return statistics.pooled_std(self.seeds) if self.seeds else None

    @cached_property
    def snr(self) -> float | None:
        """Signal over the larger of the two noises."""
        noises = [noise for noise in (self.checkpoint_noise, self.seed_noise) if noise is not None]
        return statistics.ratio(self.signal, max(noises)) if noises else None

    @cached_property
    def ranks(self) -> tuple[float, float, float] | None:
        """Spearman's and Kendall's correlation of score with FLOPs, positive where more FLOPs are better, and p."""
        if len({point.flops for point in self.finals}) < MIN_SCALES:
            return None
        flops = [point.flops for point in self.finals]
        better = [-point.value if self.measure == "bits_per_byte" else point.value for point in self.finals]
        return (
            statistics.spearman(flops, better),
            statistics.kendall(flops, better),
            statistics.p_increasing(flops, better),
        )

    @cached_property
    def above_chance_from(self) -> float | None:
        """The FLOPs from which on the interval of every score is above chance; None if never, or without a chance."""
        if self.measure != "accuracy" or self.chance is None:
            return None
        start = None
        for point in sorted((point for run in self.points for point in run), key=lambda point: -point.flops):
            if point.interval is None or point.interval[0] <= self.chance:
                break
            start = point.flops
        return start

    @cached_property
    def kind(self) -> Class | None:
        """How the row behaves; None where ``missing`` says what is needed to decide."""
        if self.snr is None:
            return None
        if self.snr < SNR_BOUND or self._at_chance:
            return "not better than noise"
        if self.ranks is None:
            return None
        return "well behaved" if self.ranks[2] <= LEVEL else "poorly behaved"

    @property
    def _at_chance(self) -> bool:
        return self.measure == "accuracy" and self.chance is not None and self.above_chance_from is None

    @property
    def missing(self) -> str:
        """The data without which the row has no class; empty where it has one."""
        if self.kind is not None:
            return ""
        if self.snr is None:
            return f"needs {self.last} checkpoints of a run, has {max(map(len, self.points))}"
        return f"needs runs of {MIN_SCALES} different FLOPs, has {len({point.flops for point in self.finals})}"

    def usable_at(self, flops: float) -> bool:
        """Return whether runs of so many FLOPs can be compared by the row."""
        at_chance = self._at_chance or (self.above_chance_from is not None and self.above_chance_from > flops)
        return self.kind == "well behaved" and not at_chance

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a ratio to no noise at all is null."""
        spearman, kendall, p = self.ranks or (None, None, None)
        return {
            **asdict(self.variant),
            "measure": self.measure,
            "runs": len(self.points),
            "signal": self.signal,
            "range": self.range,
            "noise_checkpoints": self.checkpoint_noise,
            "noise_seeds": self.seed_noise,
            "snr": None if self.snr is None or math.isinf(self.snr) else self.snr,
            "spearman": spearman,
            "kendall": kendall,
            "p": p,
            "chance": self.chance,
            "above_chance_from_flops": self.above_chance_from,
            "class": self.kind,
            "missing": self.missing or None,
            "points": [[asdict(point) for point in run] for run in self.points],
        }


@dataclass(frozen=True)
class TaskGroup:
    """A measure of a task over its shot counts."""

    rows: Sequence[Row]
    """Ascending in shots."""

    @property
    def group(self) -> Group | None:
        """One of the four groups; None where a row has no class."""
        kinds = [row.kind for row in self.rows]
        if None in kinds:
            return None
        if all(kind == "well behaved" for kind in kinds):
            return "well behaved"
        if kinds[-1] == "well behaved":
            return "given enough shots" if self.enough_shots is not None else "poorly behaved"
        return "not better than noise" if all(kind == "not better than noise" for kind in kinds) else "poorly behaved"

    @property
    def enough_shots(self) -> int | None:
        """The shots from which on all rows are well behaved; None if there are none, or the shots are unknown."""
        start = None
        for row in reversed(self.rows):
            if row.kind != "well behaved":
                break
            start = row.variant.shots
        return start


@dataclass(frozen=True)
class Recommendation:
    """The rows to use from so many FLOPs on: of each task and measure the shots of highest signal to noise."""

    flops: float
    rows: Sequence[Row]


@dataclass(frozen=True)
class Calibration:
    """All rows, best signal to noise first."""

    runs: Sequence[RunScores]
    rows: Sequence[Row]
    last: int

    @cached_property
    def groups(self) -> list[TaskGroup]:
        """The rows by suite, task, mode, limit and measure."""
        parts: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            variant = row.variant
            parts.setdefault((variant.suite, variant.task, variant.mode, variant.limit, row.measure), []).append(row)
        return [TaskGroup(sorted(rows, key=lambda row: _shots(row.variant))) for rows in parts.values()]

    @cached_property
    def scales(self) -> list[float]:
        """The FLOPs at the ends of the runs, ascending."""
        return sorted({point.flops for row in self.rows for point in row.finals})

    @cached_property
    def recommendations(self) -> list[Recommendation]:
        """What to use, from each scale at which it changes."""
        changes: list[Recommendation] = []
        for flops in self.scales:
            best: dict[tuple[str, str, str], Row] = {}
            for row in self.rows:  # best first
                if row.usable_at(flops):
                    best.setdefault((row.variant.suite, row.variant.task, row.measure), row)
            rows = list(best.values())
            if not changes or changes[-1].rows != rows:
                changes.append(Recommendation(flops, rows))
        return changes

    @cached_property
    def labels(self) -> dict[Variant, str]:
        """The name of each variant without its shots: the task, with what distinguishes it from others of that name."""
        variants = list(dict.fromkeys(row.variant for row in self.rows))
        suites = {variant.suite for variant in variants}
        labels = {}
        for variant in variants:
            of_task = [each for each in variants if (each.suite, each.task) == (variant.suite, variant.task)]
            parts = [variant.task if len(suites) == 1 else f"{variant.suite}/{variant.task}"]
            parts += [str(variant.mode)] if len({each.mode for each in of_task}) > 1 else []
            parts += [f"limit {variant.limit}"] if len({each.limit for each in of_task}) > 1 else []
            labels[variant] = ", ".join(parts)
        return labels

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "runs": {run.name: run.folder for run in self.runs},
            "flops_formula": FORMULA,
            "last": self.last,
            "snr_bound": SNR_BOUND,
            "level": LEVEL,
            "rows": [row.to_json() for row in self.rows],
            "groups": [
                {
                    **{key: value for key, value in asdict(group.rows[0].variant).items() if key != "shots"},
                    "measure": group.rows[0].measure,
                    "shots": [row.variant.shots for row in group.rows],
                    "group": group.group,
                    "enough_shots": group.enough_shots,
                }
                for group in self.groups
            ],
            "recommendations": [
                {
                    "from_flops": each.flops,
                    "use": [
                        {"suite": row.variant.suite, "task": row.variant.task, "shots": row.variant.shots,
                         "measure": row.measure}
                        for row in each.rows
                    ],
                }
                for each in self.recommendations
            ],
        }  # fmt: skip


def calibrate(runs: Sequence[str], *, suite: str | None = None, last: int = 3) -> Calibration:
    """Read the runs and compute the calibration; ``last``: checkpoints of a run whose spread is its noise.

    A row needs two runs. Raises UserError for fewer runs, DataError where no score is in two of them.
    """
    if last < 2:
        raise UserError(f"--last {last} has no spread", allowed="2 checkpoints or more")
    if len({resolve(run).resolve() for run in runs}) < len(runs) or len(runs) < 2:
        raise UserError(
            f"a calibration compares runs, and there is {len(runs)}" if len(runs) < 2 else "a run is given twice",
            allowed=f"2 runs or more; {MIN_SCALES} of different FLOPs for the correlation with FLOPs",
            hint="smalti eval calibrate runs/small runs/medium runs/large runs/largest",
        )
    scores = [read_scores(run, suite=suite) for run in runs]
    seeds = _seed_groups(scores)
    rows = []
    for key in dict.fromkeys(key for run in scores for key in run.points):
        variant, measure = key
        points = [run.points[key] for run in scores if key in run.points]
        if len(points) < 2:
            continue
        chance = next((run.chances[variant] for run in scores if variant in run.chances), None)
        of_seeds = _by_step([[run.points[key][-1] for run in group if key in run.points] for group in seeds])
        rows.append(Row(variant, measure, chance, points, of_seeds, last))
    if not rows:
        raise _nothing_shared(scores, suite)
    rows.sort(key=lambda row: (-(row.snr or 0.0), row.variant.task, _shots(row.variant), MEASURES.index(row.measure)))
    return Calibration(scores, rows, last)


def _shots(variant: Variant) -> int:
    return -1 if variant.shots is None else variant.shots


def _seed_groups(runs: Sequence[RunScores]) -> list[list[RunScores]]:
    """Return the runs whose identity differs in nothing but the seed, in groups of two or more seeds."""
    groups: dict[str, list[RunScores]] = {}
    for run in runs:
        values = {key: value for key, value in flatten(identity(run.config)).items() if key not in ("name", "seed")}
        groups.setdefault(repr(sorted(values.items())), []).append(run)
    return [group for group in groups.values() if len({run.config.seed for run in group}) > 1]


def _by_step(groups: Sequence[Sequence[Point]]) -> list[list[float]]:
    """Split groups of last points by step, and return the values of those with two or more."""
    parts = [
        [point.value for point in group if point.step == step]
        for group in groups
        for step in sorted({point.step for point in group})
    ]
    return [values for values in parts if len(values) > 1]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "no scores"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _nothing_shared(runs: Sequence[RunScores], suite: str | None) -> DataError:
    held = "; ".join(f"{run.name} has {_some(sorted({f'{v.suite}/{v.task}' for v, _ in run.points}))}" for run in runs)
    return DataError(
        f"no score{f' of the suite {suite!r}' if suite else ''} is in two of the runs: {held}",
        allowed="tasks of one suite with equal shots, mode and limit in two runs or more, during training or after it",
        hint="a section evals: in the recipe, or for each run: smalti eval run RUN",
    )
