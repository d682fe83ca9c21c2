"""The picture of ``smalti plan scaling``: speed and MFU over the number of devices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.cost.layout.scaling import Curve

_LABELS = {"strong": "one batch", "weak": "batch that grows", "dense": "dense model of as many active parameters"}
_COLOURS = {"strong": 0, "weak": 1, "dense": 2}
_IDEAL = 7


def picture(name: str, device: str, curves: dict[str, "Curve"]) -> str:
    """An SVG file of two charts."""
    from smalti.base.chart import column, standalone

    charts = [_speed(name, device, curves), _mfu(curves)]
    return standalone(column(charts, title=f"{name} on many devices"))


def _speed(name: str, device: str, curves: dict[str, "Curve"]) -> str:
    from smalti.base.chart import Series, line_chart

    lines = []
    for kind, found in curves.items():
        shown = [point.prediction for point in found.points]
        gpus = [float(one.gpus) for one in shown]
        if shown:
            speed = shown[0].tokens_per_s / shown[0].gpus
            lines.append(Series("", gpus, [speed * one for one in gpus], dashed=True, colour=_IDEAL))
        lines.append(Series(_LABELS[kind], gpus, [one.tokens_per_s for one in shown], colour=_COLOURS[kind]))
    title = f"{name} on {device}: tokens per second; dashed: in proportion to the devices"
    return line_chart(lines, title=title, x_label="devices", log_x=True, log_y=True)


def _mfu(curves: dict[str, "Curve"]) -> str:
    from smalti.base.chart import Cross, Series, line_chart
    from smalti.base.units import format_frac

    lines, crosses = [], []
    for kind, found in curves.items():
        shown = [point.prediction for point in found.points if point.prediction.mfu is not None]
        x, colour = [float(one.gpus) for one in shown], _COLOURS[kind]
        lines.append(Series(_LABELS[kind], x, [one.mfu or 0.0 for one in shown], colour=colour))
        if kind == "dense":
            continue
        for one in shown:
            interval = one.mfu_interval if kind == "weak" else None
            label = f"{one.gpus:,} devices, {one.layout}: {format_frac(one.mfu or 0.0)}"
            crosses.append(Cross(one.gpus, one.mfu or 0.0, label, y_interval=interval, colour=colour))
    title = "MFU; whiskers: its interval for the batch that grows"
    return line_chart(
        lines, title=title, x_label="devices", log_x=True, from_zero=True, crosses=crosses,
        format_y=lambda value: format_frac(value),
    )  # fmt: skip
