"""Overlaid curves of runs in one chart, over steps, tokens or training time."""

from collections.abc import Callable, Sequence

from smalti.base.chart import Series, line_chart
from smalti.base.errors import UserError, nearest
from smalti.base.units import format_count, format_frac
from smalti.track.names import metric as row_of
from smalti.track.report.read import RunRecord, smooth

AXES = {"step": "step", "tokens": "time/token", "time": "time/train"}
"""What curves may be drawn over -> the metric that says so."""

MOST = 8
"""A chart has so many colours that can be told apart."""

_LOG = ("loss/", "metrics/", "l2_norm/")
_FORMAT: dict[str, Callable[[float], str]] = {
    "throughput/tokens_per_sec": format_count,
    "throughput/device/mfu": format_frac,
}
_SMOOTHED = "loss/train/"


def overlay(
    runs: Sequence[RunRecord], names: Sequence[str], metric: str, *, x: str = "step", width: int, height: int
) -> str:
    """The chart of ``metric``, a colour for each run; a training loss is smoothed, with the raw values behind it.

    UserError for a metric that no run has, an unknown axis, or more runs than colours.
    """
    check(runs, metric, x)
    series = []
    scale, unit = _hours_scale(runs) if x == "time" else (1.0, x)
    for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
        places, values = curve(run, metric, x)
        places = [place * scale for place in places]
        window = max(1, len(values) // 40) if metric.startswith(_SMOOTHED) else 1
        if window > 1:
            series.append(Series(name, places, values, faint=True, colour=colour))
        series.append(Series(name, places, smooth(values, window=window), colour=colour))
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
    """Places and values of a metric, at the steps whose place on the axis is known."""
    axis = AXES[x]
    rows = [row for row in run.rows if metric in row and isinstance(row.get(axis), int | float)]
    found = [row[metric] for row in rows]
    values = [float(value) if isinstance(value, int | float) else float("nan") for value in found]
    return [float(row[axis]) for row in rows], values


def check(runs: Sequence[RunRecord], metric: str, x: str) -> None:
    """UserError for what ``overlay`` cannot draw."""
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} runs in one chart", allowed=f"at most {MOST}, so that colours can be told apart")
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
    """From hours to the unit in which the longest run reads best."""
    longest = max((run.last("time/train") or 0.0 for run in runs), default=0.0)
    if longest >= 2:
        return 1.0, "hours of training"
    return (60.0, "minutes of training") if longest * 60 >= 2 else (3600.0, "seconds of training")
