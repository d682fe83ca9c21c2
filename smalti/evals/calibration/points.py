"""Reads the scores of a run over its steps: from tasks during training, and from every folder of results.

Scores of equal suite, task, shots, mode and limit belong together; where both sources have one of a step, the results
are taken. The FLOPs of a step are those of its tokens under ``cost.flops``, so a model that ``init_from`` loads counts
nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from smalti.base.errors import DataError, UserError
from smalti.config.eval import InLoopConfig
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.config.task import TaskConfig
from smalti.cost.flops import train_flops_per_token
from smalti.evals.gauntlet.table import BENCHMARKS, BY_NAME
from smalti.evals.tasks.find import GAUNTLET, load_task
from smalti.evals.tasks.generated import generator
from smalti.evals.tasks.prompts import limit_of
from smalti.track.report.read import RunRecord, read_run
from smalti.track.run import resolve

K = TypeVar("K")

MEASURES = ("accuracy", "gold_probability", "bits_per_byte")
_PREFIX = "icl/metrics/"
_GAUNTLET_GROUP = "eval_gauntlet"
_AVERAGES = {"core_average", *(benchmark.category for benchmark in BENCHMARKS)}


@dataclass(frozen=True)
class Variant:
    """A task as it was asked; None where unknown, or where the task has no such setting."""

    suite: str
    task: str
    shots: int | None = None
    mode: str | None = None
    limit: int | None = None
    """Questions of a generated task, ``limit`` of others, bytes of held-out text."""


@dataclass(frozen=True)
class Point:
    """A score of a run at a step; the interval is None where the measure has none."""

    step: int
    flops: float
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class RunScores:
    """The scores of a run."""

    name: str
    folder: str
    config: RunConfig
    points: Mapping[tuple[Variant, str], list[Point]]
    """(variant, measure) -> points, ascending in steps."""
    chances: Mapping[Variant, float]
    """Accuracy of a random answer, where it is known."""


@dataclass(frozen=True)
class _Score:
    values: Mapping[str, float]
    interval: tuple[float, float] | None
    measure: str
    """The one that the interval is of."""
    chance: float | None


def read_scores(run: str, *, suite: str | None = None) -> RunScores:
    """Read a run by folder, or by name in ``runs/``; ``suite``: scores of this suite alone.

    Raises DataError where the folder or its config cannot be read.
    """
    record = read_run(resolve(run))
    try:
        config = from_dict(RunConfig, record.config).config
    except UserError as error:
        raise DataError(
            f"{run}: config.yaml is not one of this version's 'smalti train', so its FLOPs are unknown: {error.message}"
        ) from error
    scores: dict[Variant, dict[int, _Score]] = {}
    for source in (_in_loop(record, config), _of_results(Path(record.folder) / "evals")):
        for variant, step, score in source:
            if suite in (None, variant.suite):
                scores.setdefault(variant, {})[step] = score
    points: dict[tuple[Variant, str], list[Point]] = {}
    for variant, by_step in scores.items():
        for step in sorted(by_step):
            score = by_step[step]
            for measure, value in score.values.items():
                interval = score.interval if measure == score.measure else None
                points.setdefault((variant, measure), []).append(Point(step, _flops(config, step), value, interval))
    chances = {
        variant: score.chance
        for variant, by_step in scores.items()
        for score in by_step.values()
        if score.chance is not None
    }
    return RunScores(record.name, record.folder, config, points, chances)


def _flops(config: RunConfig, step: int) -> float:
    tokens = config.tokens_by_seq_len(step)
    return float(sum(train_flops_per_token(config.model, seq_len) * n for seq_len, n in tokens.items()))


def _in_loop(record: RunRecord, config: RunConfig) -> list[tuple[Variant, int, _Score]]:
    prefixes = sorted(name for name in record.names if name.startswith(_PREFIX) and name.count("/") == 3)
    settings = _settings(config.evals) if config.evals else {}
    scores = []
    for name in prefixes:
        group, task = name.removeprefix(_PREFIX).split("/")
        if group == _GAUNTLET_GROUP and task in _AVERAGES:
            continue
        suite = GAUNTLET if group == _GAUNTLET_GROUP else group
        shots, mode, limit, chance = settings.get(task, (None, None, None, None))
        for row in record.rows:
            values = {measure: row.get(name if measure == "accuracy" else f"{name}/{measure}") for measure in MEASURES}
            known = _finite(values)
            if known:
                ends = _interval([row.get(f"{name}/low"), row.get(f"{name}/high")])
                variant = Variant(suite, task, shots, mode, limit)
                scores.append((variant, int(row["step"]), _Score(known, ends, "accuracy", chance)))
    return scores


_Settings = tuple[int | None, str | None, int | None, float | None]


def _settings(evals: InLoopConfig) -> dict[str, _Settings]:
    """Return shots, mode, limit and chance of each task that runs during training; files need not exist."""
    settings: dict[str, _Settings] = {}
    for entry in evals.tasks:
        if entry == GAUNTLET:
            settings |= {each.name: _of_task(each.task(""), evals) for each in BENCHMARKS if each.kind != "code"}
        elif isinstance(entry, TaskConfig):
            settings[entry.name or Path(entry.file).name.split(".")[0]] = _of_task(entry, evals)
        elif (made := generator(entry)) is not None:
            settings[entry] = (evals.shots if made.n_tokens is None else None, None, evals.n, made.chance)
        elif entry in BY_NAME:
            settings[entry] = _of_task(BY_NAME[entry].task(""), evals)
        elif Path(entry).is_file():
            task = load_task(entry)
            settings[task.name] = _of_task(task.config, evals)
    return settings


def _of_task(task: TaskConfig, evals: InLoopConfig) -> _Settings:
    return task.shots if evals.task_shots is None else evals.task_shots, evals.mode, limit_of(task, evals), task.chance


def _of_results(folder: Path) -> list[tuple[Variant, int, _Score]]:
    """Read all results with a step, oldest first."""
    scores = []
    for path in sorted(folder.glob("*/*/results.json"), key=lambda path: path.parent.name):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            step, config = results.get("step"), results.get("config") or {}
            tasks = results.get("tasks") or {}
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path} is not a file of results: {error}") from error
        if path.parent.name.startswith(".") or not isinstance(step, int) or step < 1:
            continue
        for task, score in tasks.items():
            values = {measure: score.get(measure) for measure in MEASURES} | {score.get("metric"): score.get("value")}
            known = _finite({measure: values[measure] for measure in MEASURES})
            variant = Variant(
                str(results.get("suite") or path.parent.parent.name), task, score.get("shots"), score.get("mode"),
                _limit(task, score, config),
            )  # fmt: skip
            interval = _interval(score.get("interval") or (None, None))
            scores.append((variant, step, _Score(known, interval, str(score.get("metric")), score.get("chance"))))
    return scores


def _limit(task: str, score: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    if score.get("metric") == "bits_per_byte":
        return config.get("max_bytes")
    if generator(task) is not None:
        return config.get("n")
    limits = (config.get("limit"), (score.get("task") or {}).get("limit"))
    return min((limit for limit in limits if limit is not None), default=None)


def _interval(ends: Sequence[Any]) -> tuple[float, float] | None:
    known = _finite(dict(enumerate(ends)))
    return (known[0], known[1]) if len(known) == 2 else None


def _finite(values: Mapping[K, Any]) -> dict[K, float]:
    return {key: float(x) for key, x in values.items() if isinstance(x, int | float) and math.isfinite(x)}
