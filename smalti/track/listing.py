"""Lists runs with a short summary of each.

A folder that cannot be read is listed with its problem and does not stop the list. Of ``metrics.jsonl`` only the end is
parsed, and lines with held-out results or a requested metric. ``track/report/read.py`` reads one run whole.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smalti.base.errors import DataError
from smalti.config.durations import RunLength
from smalti.track.line_file import read_lines
from smalti.track.owner import with_owner

_MARKS = ("config.yaml", "status.json", "metrics.jsonl", "events.jsonl")
_TAIL_BYTES = 1 << 15
_EVAL = b'"metrics/eval/'
_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast; needs PyYAML with libyaml


@dataclass(frozen=True)
class BestEval:
    """The best held-out result of a run so far: the mean over its sources at one step."""

    value: float
    step: int
    metric: str
    """``bits_per_byte``, or ``LanguageCrossEntropy`` (nats per token) where no bits were measured."""


@dataclass(frozen=True)
class RunSummary:
    """One run in a few values; None where unknown."""

    name: str
    """Name of the folder, which differs from the config's ``name`` after a copy or a move."""
    folder: str
    state: str
    reason: str | None = None
    step: int | None = None
    steps_total: int | None = None
    attempt: int | None = None
    loss: float | None = None
    tokens: float | None = None
    tokens_per_s: float | None = None
    mfu_frac: float | None = None
    train_s: float | None = None
    best_eval: BestEval | None = None
    heartbeat: str | None = None
    problem: str | None = None
    """Why the folder cannot be read; ``state`` is ``broken`` then."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest value of every metric of the last steps, and of the requested ones."""
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """``config.yaml`` as plain values."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with all fields but the config."""
        return {name: value for name, value in asdict(self).items() if name != "config"}


def list_runs(folder: str, *, metrics: Collection[str] = ()) -> list[RunSummary]:
    """Return the runs directly in ``folder``, newest heartbeat first; ``metrics`` are searched for in the whole file.

    Raises DataError if ``folder`` does not exist.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"there is no folder '{folder}'", hint="smalti runs ls FOLDER")
    runs = [summary(entry, metrics=metrics) for entry in sorted(root.iterdir()) if _is_run(entry)]
    return sorted(runs, key=lambda run: run.heartbeat or "", reverse=True)


def summary(folder: Path, *, metrics: Collection[str] = ()) -> RunSummary:
    """Return the summary of one run; an error of its folder is in ``problem``."""
    try:
        return _read(folder, metrics)
    except (OSError, ValueError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        return RunSummary(folder.name, str(folder), "broken", problem=text[:200])


def best_eval(path: Path) -> BestEval | None:
    """Return the lowest mean over sources of the held-out results in a metrics file."""
    by_step: dict[int, dict[str, float]] = {}
    if not path.exists():
        return None
    with path.open("rb") as file:
        for line in file:
            if _EVAL in line and (row := _row(line)) is not None:
                by_step.setdefault(row["step"], {}).update(_numbers(row, "metrics/eval/"))
    for metric in ("bits_per_byte", "LanguageCrossEntropy"):
        means = []
        for step, row in by_step.items():
            values = [value for name, value in row.items() if name.endswith(f"/{metric}")]
            if values:
                means.append((sum(values) / len(values), step))
        if means:
            return BestEval(*min(means), metric=metric)
    return None


def _is_run(folder: Path) -> bool:
    try:
        return folder.is_dir() and any((folder / name).exists() for name in _MARKS)
    except OSError:
        return folder.is_dir()  # access is denied: the list reports it


def _read(folder: Path, requested: Collection[str]) -> RunSummary:
    config = _config(folder / "config.yaml")
    status = with_owner(folder, _status(folder / "status.json"))
    step, metrics = newest(folder / "metrics.jsonl")
    metrics |= _last_of(folder / "metrics.jsonl", [name for name in requested if name not in metrics])
    hours = metrics.get("time/train")
    return RunSummary(
        name=folder.name,
        folder=str(folder),
        state=str(status.get("state") or "unknown"),
        reason=status.get("reason"),
        step=step if step is not None else status.get("step"),
        steps_total=_steps_total(config),
        attempt=status.get("attempt"),
        loss=metrics.get("loss/train/total"),
        tokens=metrics.get("time/token"),
        tokens_per_s=metrics.get("throughput/tokens_per_sec"),
        mfu_frac=metrics.get("throughput/device/mfu"),
        train_s=None if hours is None else hours * 3600,
        best_eval=best_eval(folder / "metrics.jsonl"),
        heartbeat=status.get("heartbeat"),
        metrics=metrics,
        config=config,
    )


def newest(path: Path) -> tuple[int | None, dict[str, float]]:
    """Return the last step of a metrics file and the newest value of each metric in its last lines."""
    if not path.exists():
        return None, {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    rows = [row for row in map(_row, lines) if row is not None]
    if not rows:  # a first line that is longer than the tail: rare enough to read it all
        rows = [row for row in read_lines(path) if isinstance(row.get("step"), int)]
    values: dict[str, float] = {}
    for row in rows:
        values.update(_numbers(row))
    return max((row["step"] for row in rows), default=None), values


def _last_of(path: Path, names: Collection[str]) -> dict[str, float]:
    """Return the last value of each of these metrics anywhere in the file."""
    values: dict[str, float] = {}
    if not names or not path.exists():
        return values
    marks = [f'"{name}"'.encode() for name in names]
    with path.open("rb") as file:
        for line in file:
            if any(mark in line for mark in marks) and (row := _row(line)) is not None:
                values.update((name, value) for name, value in _numbers(row).items() if name in names)
    return values


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _numbers(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and name.startswith(prefix) and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError("config.yaml is missing")
    value = yaml.load(path.read_bytes(), Loader=_Loader)
    if not isinstance(value, dict):
        raise ValueError("config.yaml has no 'key: value' lines")
    return value


def _status(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError:
        raise ValueError("status.json is not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("status.json is not a JSON object")
    return value


def _steps_total(config: dict[str, Any]) -> int | None:
    length = RunLength.of_plain(config)
    return None if length is None else length.total_steps
