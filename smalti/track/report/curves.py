"""The charts of the report: metrics over the steps of a run, and bars of held-out results."""

import itertools
import math
from collections.abc import Callable

from smalti.base.chart import Bar, Marker, Series, bar_chart, line_chart, stacked_area
from smalti.base.units import format_count, format_frac
from smalti.track.report.continued import Continued
from smalti.track.report.read import RunRecord, get, smooth

_EVAL, _LOSS, _BITS = "metrics/eval/", "/LanguageCrossEntropy", "/bits_per_byte"
_MIX, _TOKENS = "data/mix/", "/tokens"
_MIX_SPANS = 48
"""Most spans in the mixture chart."""
_MIX_SPAN_SEQUENCES = 64
"""Fewest sequences in one of its spans: the share in fewer sequences is too noisy to draw."""
_TRAIN_COLOUR = 7
_SMALL_WIDTH, _SMALL_HEIGHT = 440, 220


def source_colours(run: RunRecord) -> dict[str, int]:
    """Return a colour for each source, the same in all charts."""
    sources = {*run.sources(_EVAL, _LOSS), *run.sources(_EVAL, _BITS), *run.sources(_MIX, _TOKENS)}
    return {source: index % _TRAIN_COLOUR for index, source in enumerate(sorted(sources))}


def loss_chart(run: RunRecord, *, width: int, height: int) -> str:
    """Return the chart of training loss (raw and smoothed) and held-out losses, on a logarithmic axis."""
    steps, values = run.series("loss/train/total")
    window = max(1, len(values) // 40)
    name = "train" if window == 1 else f"train (mean of {window} points)"
    series = [Series(name, steps, smooth(values, window=window), colour=_TRAIN_COLOUR)]
    if window > 1:
        series.insert(0, Series("train", steps, values, faint=True, colour=_TRAIN_COLOUR))
    colours = source_colours(run)
    for source in run.sources(_EVAL, _LOSS):
        series.append(Series(f"held-out: {source}", *run.series(f"{_EVAL}{source}{_LOSS}"), colour=colours[source]))
    resumed = [event for event in run.events if event.get("event") == "resumed" and isinstance(event.get("step"), int)]
    markers = [Marker(event["step"], f"resumed at step {event['step']}") for event in resumed]
    title = "Loss, nats per token" + (" (dashed: resumed)" if markers else "")
    return line_chart(series, title=title, x_label="step", log_y=True, markers=markers, width=width, height=height)


def bits_chart(run: RunRecord) -> str | None:
    """Return the chart of held-out bits per byte; None where they were not measured."""
    sources = run.sources(_EVAL, _BITS)
    if not sources:
        return None
    colours = source_colours(run)
    series = [Series(name, *run.series(f"{_EVAL}{name}{_BITS}"), colour=colours[name]) for name in sources]
    return line_chart(series, title="Held-out bits per byte", x_label="step", width=_SMALL_WIDTH, height=_SMALL_HEIGHT)


def continued_chart(run: RunRecord, comparison: Continued, *, width: int) -> str | None:
    """Return the chart of the relative change of bits per byte since step 0, with the bounds of ``data.retain``; None
    where the values cannot be compared."""
    if comparison.unlike:
        return None
    colours = source_colours(run)
    series = []
    for change in comparison.changes:
        domain = "new" if change.allowed_frac is None else "old"
        bound = change.allowed_frac
        colour = colours[change.name]
        steps, bits = run.series(f"{_EVAL}{change.name}{_BITS}")
        changes = [value / change.before - 1 for value in bits]
        series.append(Series(f"{domain}: {change.name}", steps, changes, colour=colour))
        if bound is not None:
            series.append(Series("bound", [0, steps[-1]], [bound, bound], dashed=True, colour=colour))
    return line_chart(
        series,
        title="Change of bits per byte (dashed: bound)",
        x_label="step",
        format_y=lambda frac: f"{frac * 100:+.3g} %",
        width=width,
        height=260,
    )


def mixture_chart(run: RunRecord) -> str | None:
    """Return the chart of each source's share of the tokens, by span of steps; None without such metrics."""
    sources = run.sources(_MIX, _TOKENS)
    rows = [row for row in run.rows if all(isinstance(row.get(_MIX + s + _TOKENS), int | float) for s in sources)]
    if not sources or not rows:
        return None
    stride = max(1, math.ceil(len(rows) / _mix_spans(run)))
    marks = [{"step": 0} | {_MIX + s + _TOKENS: 0 for s in sources}, *rows[stride - 1 :: stride]]
    x: list[float] = []
    shares: dict[str, list[float]] = {source: [] for source in sources}
    for before, after in itertools.pairwise(marks):
        # A share belongs to a span of steps, so it is drawn flat from the beginning of the span to its end.
        for step in (before["step"], after["step"]):
            x.append(float(step))
            for source in sources:
                name = _MIX + source + _TOKENS
                shares[source].append(float(after[name]) - float(before[name]))
    colours = [source_colours(run)[source] for source in sources]
    title = "Mixture: share of tokens"
    return stacked_area(
        x, shares, title=title, x_label="step", colours=colours, width=_SMALL_WIDTH, height=_SMALL_HEIGHT
    )


def _mix_spans(run: RunRecord) -> int:
    seq_len = get(run.config, "data.seq_len")
    tokens = run.last("time/token")
    if not isinstance(seq_len, int) or seq_len < 1 or tokens is None:
        return _MIX_SPANS
    return max(1, min(_MIX_SPANS, int(tokens / seq_len / _MIX_SPAN_SEQUENCES)))


def small_charts(run: RunRecord) -> list[str]:
    """Return the charts of learning rate, speed, MFU and gradient norm that the run has."""
    charts: list[str | None] = [bits_chart(run), mixture_chart(run)]
    lr = next((name for name in sorted(run.names) if name.startswith("lr-")), None)
    if lr:
        charts.append(_chart(run, lr, "Learning rate", from_zero=True))
    charts.append(_chart(run, "throughput/tokens_per_sec", "Tokens per second", from_zero=True, format_y=format_count))
    charts.append(_chart(run, "throughput/device/mfu", "Model FLOPs utilisation", from_zero=True, format_y=format_frac))
    charts.append(_chart(run, "l2_norm/grad/global", "Gradient norm before clipping", log_y=True))
    return [chart for chart in charts if chart is not None]


def bits_bars(tasks: dict[str, dict[str, object]], colours: dict[str, int], *, width: int) -> str | None:
    """Return bars of bits per byte of the model, gzip -9 and xz -9, by held-out source; None without such a task."""
    bars: list[Bar] = []
    for name, score in tasks.items():
        value = _float(score.get("value"))
        if score.get("metric") != "bits_per_byte" or value is None:
            continue
        source = name.rpartition("/")[2]
        interval = score.get("interval")
        pair = [_float(end) for end in interval] if isinstance(interval, list) else []
        ends = (pair[0], pair[1]) if len(pair) == 2 and pair[0] is not None and pair[1] is not None else None
        label = f"{source}: this model"
        bars.append(Bar(label, value, interval=ends, text=f"{value:.3f}", colour=colours.get(source, 0)))
        for program, label in (("gzip", "gzip -9"), ("xz", "xz -9")):
            other = _float(score.get(f"{program}_bits_per_byte"))
            if other is not None:
                bars.append(Bar(f"{source}: {label}", other, text=f"{other:.3f}", colour=_TRAIN_COLOUR))
    return bar_chart(bars, title="Held-out bits per byte (shorter is better)", width=width) if bars else None


def _chart(
    run: RunRecord,
    name: str,
    title: str,
    *,
    from_zero: bool = False,
    log_y: bool = False,
    format_y: Callable[[float], str] | None = None,
) -> str | None:
    if name not in run.names:
        return None
    series = [Series(title, *run.series(name))]
    return line_chart(
        series,
        title=title,
        x_label="step",
        from_zero=from_zero,
        log_y=log_y,
        format_y=format_y,
        width=_SMALL_WIDTH,
        height=_SMALL_HEIGHT,
    )


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
