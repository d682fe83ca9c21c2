"""``metrics.jsonl``: the run's metrics, a line for each logged step: ``{"step", "time", "<metric name>": number}``.

The other sinks are copies of the numbers of this file; a metric may be a list of numbers too, in a line of its own.
Names are those of ``track.names``; a resumed run holds no step twice. A number that is not finite is written as null.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base.clock import utc_text
from smalti.track import names
from smalti.track.line_file import LineFile, read_lines, rewrite

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to a run's metrics; only rank 0 writes."""

    def __init__(self, folder: str | Path, *, resumed_step: int | None = None) -> None:
        """Open the file. Lines after ``resumed_step``, the step of the checkpoint, are dropped, as their steps are
        repeated; -1 drops all lines, None keeps all."""
        path = Path(folder) / FILE_NAME
        self.dropped_lines = 0
        if resumed_step is not None:
            self.dropped_lines = rewrite(path, lambda line: _is_row(line) and line["step"] <= resumed_step)
        self._file = LineFile(path)

    def write(self, step: int, values: Mapping[str, float | list[float]]) -> None:
        """Append the metrics of a step. Raises SmaltiError for a name that is not in ``track.names``."""
        names.check(values)
        self._file.write({"step": step, "time": utc_text(), **values})

    def update(self, step: int, metrics: Mapping[str, float | list[float]]) -> None:
        """Append the metrics of a step, as ``write``: the method that all sinks have."""
        self.write(step, metrics)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return all lines of a run folder's metrics, in the order written; lines without a step are skipped."""
    return [line for line in read_lines(Path(folder) / FILE_NAME) if _is_row(line)]


def _is_row(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int)
