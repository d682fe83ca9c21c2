"""The section of the report about the routers of an MoE: load, entropy and experts without tokens.

Runs of a version that recorded less have the charts of what they recorded.
"""

import re
from collections.abc import Callable
from html import escape

from smalti.base.chart import Series, heatmap, line_chart
from smalti.base.units import format_frac
from smalti.track.report.read import RunRecord, smooth
from smalti.track.report.words import event_words

_SHOWN = 6
"""Most layers in the charts."""
_WARNINGS = 3
_WIDTH, _HEIGHT = 440, 240
_IMBALANCE = "moe/load_imbalance"
_LAYER = re.compile(re.escape(_IMBALANCE) + r"/layer(\d+)")
_CURVES: tuple[tuple[str, str, Callable[[float], str] | None], ...] = (
    (_IMBALANCE, "Busiest expert over the average", None),
    ("moe/router_entropy", "Entropy of the router, of log(experts)", None),
    ("moe/dead_experts_frac", "Experts without a token", format_frac),
)


def experts_section(run: RunRecord) -> str:
    """Return the section; empty for a run without experts."""
    layers = sorted(int(match[1]) for name in run.names if (match := _LAYER.fullmatch(name)))
    shown = sorted(sorted(layers, key=lambda layer: -_tail(run, layer))[:_SHOWN])
    charts = [chart for row in _CURVES if (chart := _curves(run, shown, *row)) is not None]
    charts += [chart for layer in shown if (chart := _load(run, layer)) is not None]
    if not charts:
        return ""
    notes = [f'<p class="note bad">{escape(words)}</p>' for words in _collapses(run)]
    if left_out := len(layers) - len(shown):
        notes.append(
            f'<p class="note">{left_out} of {len(layers)} layers are not shown: those whose busiest expert had the '
            "fewest tokens in the last fifth of the steps.</p>"
        )
    grid = "".join(f"<figure>{chart}</figure>" for chart in charts)
    return f'<h2>Experts</h2>{"".join(notes)}<div class="grid">{grid}</div>'


def _tail(run: RunRecord, layer: int) -> float:
    mean = run.tail_mean(f"{_IMBALANCE}/layer{layer}", frac=0.2)
    return 0.0 if mean is None else mean


def _curves(
    run: RunRecord, layers: list[int], name: str, title: str, format_y: Callable[[float], str] | None
) -> str | None:
    """Return the chart of a metric, smoothed, with a line for each of the layers; of the metric itself without any."""
    lines = [(f"layer {layer}", *run.series(f"{name}/layer{layer}")) for layer in layers] or [
        (title, *run.series(name))
    ]
    window = max(1, len(lines[0][1]) // 40)
    series = [Series(label, steps, smooth(values, window=window)) for label, steps, values in lines if steps]
    if not series:
        return None
    mean = f" (mean of {window} points)" if window > 1 else ""
    return line_chart(
        series, title=title + mean, x_label="step", from_zero=name != _IMBALANCE, format_y=format_y,
        width=_WIDTH, height=_HEIGHT,
    )  # fmt: skip


def _load(run: RunRecord, layer: int) -> str | None:
    """Return the heatmap of a layer; None where the load of each expert was not recorded."""
    name = f"moe/load/layer{layer}"
    pairs = [(row["step"], row[name]) for row in run.rows if isinstance(row.get(name), list)]
    if not pairs:
        return None
    experts = [[_number(load) for load in loads] for loads in zip(*(loads for _, loads in pairs), strict=True)]
    return heatmap(
        [step for step, _ in pairs], experts, title=f"Layer {layer}: load of each expert (a row) over the average",
        row_name="expert", x_label="step", width=_WIDTH, height=max(_HEIGHT, 96 + 3 * len(experts) // 2),
    )  # fmt: skip


def _collapses(run: RunRecord) -> list[str]:
    events = [event for event in run.events if event.get("event") == "router_collapsed"]
    facts = [({key: event[key] for key in event if key != "hint"}, event.get("hint")) for event in events[-_WARNINGS:]]
    return [f"The routers of some layers have collapsed: {event_words(fact)}. hint: {hint}" for fact, hint in facts]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
