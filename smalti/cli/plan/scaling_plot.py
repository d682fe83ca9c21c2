"""The plot of ``smalti plan scaling``: speed and MFU over the number of devices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.cost.layout.scaling import Curve

_LABELS = {"strong": "one batch", "weak": "batch that grows", "dense": "dense model with as many active parameters"}
_COLOURS = {"strong": 0, "weak": 1, "dense": 2}
_IDEAL = 7


def plot_scaling(name: str, device: str, curves: dict[str, "Curve"]) -> str:
    """Return an SVG file of two charts."""
    from smalti.base.chart import column, standalone

    charts = [_speed(name, device, curves), _mfu(curves)]
    return standalone(column(charts, title=f"{name} on many devices"))


def _speed(name: str, device: str, curves: dict[str, "Curve"]) -> str:
    from smalti.base.chart import Series, line_chart

    lines = []
    for kind, curve in curves.items():
        predictions = [point.prediction for point in curve.points]
        gpus = [float(prediction.gpus) for prediction in predictions]
        if predictions:
            speed = predictions[0].tokens_per_s / predictions[0].gpus
            lines.append(Series("", gpus, [speed * number for number in gpus], dashed=True, colour=_IDEAL))
        lines.append(
            Series(_LABELS[kind], gpus, [prediction.tokens_per_s for prediction in predictions], colour=_COLOURS[kind])
        )
    title = f"{name} on {device}: tokens per second; dashed: proportional to the devices"
    return line_chart(lines, title=title, x_label="devices", log_x=True, log_y=True)


def _mfu(curves: dict[str, "Curve"]) -> str:
    from smalti.base.chart import Cross, Series, line_chart
    from smalti.base.units import format_frac

    lines = []
    crosses = []
    for kind, curve in curves.items():
        predictions = [point.prediction for point in curve.points if point.prediction.mfu is not None]
        x = [float(prediction.gpus) for prediction in predictions]
        colour = _COLOURS[kind]
        lines.append(Series(_LABELS[kind], x, [prediction.mfu or 0.0 for prediction in predictions], colour=colour))
        if kind == "dense":
            continue
        for prediction in predictions:
            interval = prediction.mfu_interval if kind == "weak" else None
            label = f"{prediction.gpus:,} devices, {prediction.layout}: {format_frac(prediction.mfu or 0.0)}"
            crosses.append(Cross(prediction.gpus, prediction.mfu or 0.0, label, y_interval=interval, colour=colour))
    title = "MFU; whiskers: its interval for the batch that grows"
    return line_chart(
        lines, title=title, x_label="devices", log_x=True, from_zero=True, crosses=crosses,
        format_y=lambda value: format_frac(value),
    )  # fmt: skip
