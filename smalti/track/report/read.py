"""Reads a run folder into plain values, also the incomplete files of a killed run."""

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smalti.base.errors import DataError
from smalti.base.units import format_quantity
from smalti.track.line_file import read_lines
from smalti.track.owner import with_owner
from smalti.track.run import no_run

_SAMPLES_A_TASK = 3
_SAMPLES = 12


@dataclass(frozen=True)
class EvalRun:
    """One folder of results, with the first samples of each task."""

    suite: str
    time: str
    results: dict[str, Any]
    samples: tuple[dict[str, Any], ...] = ()

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Score of each task."""
        tasks = self.results.get("tasks")
        return (
            {name: score for name, score in tasks.items() if isinstance(score, dict)} if isinstance(tasks, dict) else {}
        )

    @property
    def averages(self) -> dict[str, dict[str, Any]]:
        """The Gauntlet's category and core averages; of other suites none."""
        gauntlet = self.results.get("gauntlet")
        if not isinstance(gauntlet, dict):
            return {}
        means = {
            name: {**mean, "n": format_quantity(mean.get("n", 0), "task")}
            for name, mean in gauntlet.get("categories", {}).items()
            if mean
        }
        if core := gauntlet.get("core_average"):
            means["core average"] = {**core, "n": f"{core.get('n', 0)} categories"}
        return {name.replace("_", " "): {**mean, "metric": "above chance"} for name, mean in means.items()}


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder."""

    name: str
    """Name of the folder, which differs from the config's ``name`` after a copy or a move."""
    folder: str
    config_text: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    status: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    """Metrics, one row for each step, ascending."""
    events: tuple[dict[str, Any], ...]
    evals: tuple[EvalRun, ...] = ()
    """The newest results of each suite."""
    samples: tuple[dict[str, Any], ...] = ()
    """The last texts that the model generated, newest first: ``{"prompt", "completion"}``."""
    names: frozenset[str] = field(default_factory=frozenset)
    """Metric names that occur, without those whose values are lists."""

    @property
    def state(self) -> str:
        """State of ``status.json`` or ``killed``; without it ``done``, ``unfinished`` or ``unknown``, by the events."""
        if state := self.status.get("state"):
            return str(state)
        kinds = [event.get("event") for event in self.events]
        return "done" if "run_finished" in kinds else "unfinished" if kinds or self.rows else "unknown"

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps and values of a metric; a value that was not finite when written is NaN."""
        rows = [row for row in self.rows if name in row]
        return [float(row["step"]) for row in rows], [_number(row[name]) for row in rows]

    def last(self, name: str) -> float | None:
        """Return the newest finite value of a metric."""
        _, values = self.series(name)
        return next((value for value in reversed(values) if value == value), None)

    def median(self, name: str) -> float | None:
        """Return the median of a metric over the run."""
        values = sorted(value for value in self.series(name)[1] if value == value)
        return values[len(values) // 2] if values else None

    def tail_mean(self, name: str, *, frac: float) -> float | None:
        """Return the mean of a metric's finite values over the last ``frac`` of the steps so far."""
        steps, values = self.series(name)
        first = (1 - frac) * (steps[-1] if steps else 0)
        tail = [value for step, value in zip(steps, values, strict=True) if step > first and value == value]
        return sum(tail) / len(tail) if tail else None

    def sources(self, prefix: str, suffix: str) -> list[str]:
        """Return the parts between ``prefix`` and ``suffix`` of the metric names, sorted."""
        names = (name for name in self.names if name.startswith(prefix) and name.endswith(suffix))
        return sorted(name[len(prefix) : len(name) - len(suffix)] for name in names)

    def of_events(self, key: str) -> Any:
        """Return the newest value of a field in any event, or None."""
        return next((event[key] for event in reversed(self.events) if event.get(key) is not None), None)


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder. Raises DataError if it does not exist or has neither config nor metrics nor events."""
    root = Path(folder)
    if not root.is_dir():
        raise no_run(root)
    if not any((root / name).exists() for name in ("config.yaml", "metrics.jsonl", "events.jsonl")):
        raise DataError(
            f"'{folder}' is not a run folder", allowed="a folder with config.yaml, metrics.jsonl or events.jsonl"
        )
    config_text = _text(root / "config.yaml")
    config = _yaml(config_text)
    rows = _rows(read_lines(root / "metrics.jsonl"))
    return RunRecord(
        name=root.resolve().name,
        folder=str(folder),
        config_text=config_text,
        config=config,
        provenance=_json(root / "provenance.json"),
        status=with_owner(root, _json(root / "status.json")),
        rows=rows,
        events=tuple(read_lines(root / "events.jsonl")),
        evals=_evals(root / "evals"),
        samples=tuple(reversed(deque(read_lines(root / "samples.jsonl"), maxlen=_SAMPLES))),
        names=frozenset(name for row in rows for name, value in row.items() if not isinstance(value, list)),
    )


def _rows(lines: Any) -> tuple[dict[str, Any], ...]:
    """Return one row for each step; lines of one step (an eval, a resumed run) are merged, and later values win."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step.setdefault(step, {}).update(line)
    return tuple(by_step[step] for step in sorted(by_step))


def _evals(folder: Path) -> tuple[EvalRun, ...]:
    newest: list[EvalRun] = []
    for suite in sorted(folder.iterdir()) if folder.is_dir() else []:
        times = sorted(path.parent for path in suite.glob("*/results.json") if not path.parent.name.startswith("."))
        for latest in times[-1:]:
            results = _json(latest / "results.json")
            newest.append(EvalRun(suite.name, latest.name, results, _first_samples(latest / "samples.jsonl")))
    return tuple(newest)


def _first_samples(path: Path) -> tuple[dict[str, Any], ...]:
    by_task: dict[str, list[dict[str, Any]]] = {}
    for sample in read_lines(path):
        samples = by_task.setdefault(str(sample.get("task", "")), [])
        if len(samples) < _SAMPLES_A_TASK and "prompt" in sample:
            samples.append(sample)
    return tuple(itertools.chain.from_iterable(by_task.values()))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def get(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key, such as ``model.hidden_size``; None where a part is missing."""
    value: Any = tree
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the centred moving mean over ``window`` values, fewer at both ends. NaN stays NaN and is not counted."""
    smoothed = []
    for index, value in enumerate(values):
        reach = min(window // 2, index, len(values) - 1 - index)
        near = [neighbour for neighbour in values[index - reach : index + reach + 1] if neighbour == neighbour]
        smoothed.append(sum(near) / len(near) if value == value else float("nan"))
    return smoothed
