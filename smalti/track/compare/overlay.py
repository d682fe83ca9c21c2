"""Overlaid curves of runs in one chart, over steps, tokens or training time."""

from collections.abc import Callable, Sequence

from smalti.base.chart import Series, line_chart
from smalti.base.errors import UserError, nearest
from smalti.base.units import format_count, format_frac
from smalti.track.names import metric as row_of
from smalti.track.report.read import RunRecord, smooth

AXES = {"step": "step", "tokens": "time/token", "time": "time/train"}
"""X axis of a chart -> the metric with its values."""

MAX_RUNS = 8
"""Number of distinguishable colours, so the most runs in one chart."""

_LOG = ("loss/", "metrics/", "l2_norm/")
_FORMAT: dict[str, Callable[[float], str]] = {
    "throughput/tokens_per_sec": format_count,
    "throughput/device/mfu": format_frac,
}
_SMOOTHED = "loss/train/"


def overlay(
    runs: Sequence[RunRecord], names: Sequence[str], metric: str, *, x: str = "step", width: int, height: int
) -> str:
    """Return the chart of ``metric``, a colour for each run; training losses are smoothed, with raw values behind them.

    Raises UserError for a metric that no run has, an unknown axis, or more runs than colours.
    """
    check(runs, metric, x)
    series = []
    scale, unit = _hours_scale(runs) if x == "time" else (1.0, x)
    for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
        xs, values = curve(run, metric, x)
        xs = [at * scale for at in xs]
        window = max(1, len(values) // 40) if metric.startswith(_SMOOTHED) else 1
        if window > 1:
            series.append(Series(name, xs, values, faint=True, colour=colour))
        series.append(Series(name, xs, smooth(values, window=window), colour=colour))
    return line_chart(
        series,
        title=f"{metric}, {row_of(metric).unit}" if row_of(metric).unit != "1" else metric,
        x_label=unit,
        log_y=metric.startswith(_LOG),
        format_y=_FORMAT.get(metric),
        width=width,
        height=height,
    )


def curve(run: RunRecord, metric: str, x: str) -> tuple[list[float], list[float]]:
    """Return x and values of a metric, at the steps whose x is known."""
    axis = AXES[x]
    rows = [row for row in run.rows if metric in row and isinstance(row.get(axis), int | float)]
    values = [float(row[metric]) if isinstance(row[metric], int | float) else float("nan") for row in rows]
    return [float(row[axis]) for row in rows], values


def check(runs: Sequence[RunRecord], metric: str, x: str) -> None:
    """Raise UserError for a chart that ``overlay`` cannot draw."""
    if len(runs) > MAX_RUNS:
        raise UserError(
            f"{len(runs)} runs are too many for one chart", allowed=f"at most {MAX_RUNS}, the number of colours"
        )
    if x not in AXES:
        raise UserError(f"--x {x} is not an axis", allowed=", ".join(AXES))
    known = sorted({name for run in runs for name in run.names if "/" in name})
    if metric not in known:
        close = nearest(metric, known)
        raise UserError(
            f"none of these runs has the metric '{metric}'",
            allowed=", ".join(known) or "(they have logged nothing)",
            hint=f"did you mean {close}?" if close else None,
        )


def _hours_scale(runs: Sequence[RunRecord]) -> tuple[float, str]:
    """Return the factor from hours to the unit that suits the longest run, and the axis label."""
    longest = max((run.last("time/train") or 0.0 for run in runs), default=0.0)
    if longest >= 2:
        return 1.0, "hours of training"
    return (60.0, "minutes of training") if longest * 60 >= 2 else (3600.0, "seconds of training")
