"""Bars with intervals and reference values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from smalti.base.chart.axis import Scale, short
from smalti.base.chart.frame import COLOURS, Frame, svg, xy


@dataclass(frozen=True)
class Bar:
    """A named value, with an interval and a reference value."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    """Drawn as a whisker."""
    reference: float | None = None
    """Drawn as a tick: chance, or another program's result."""
    text: str | None = None
    """Printed after the bar; None: the value."""
    colour: int = 0
    """Number of one of the eight colours."""


def bar_chart(bars: Sequence[Bar], *, title: str, low: float = 0.0, high: float | None = None, width: int = 720) -> str:
    """Draw horizontal bars from ``low``, with whiskers for intervals and ticks for references."""
    row, head = 24, 34
    known = [bar for bar in bars if math.isfinite(bar.value)]
    if not known:
        return Frame(title, width, 90, []).empty()
    label_width = min(220, 16 + round(6.4 * max(len(bar.label) for bar in known)))
    ends = [x for bar in known for x in (bar.value, *(bar.interval or ()), bar.reference or bar.value)]
    scale = Scale([low, high if high is not None else max([*ends, low + 1e-9])], label_width, width - 92)
    parts = [f'<text class="t" x="0" y="14">{escape(title)}</text>']
    for index, bar in enumerate(known):
        top = head + index * row
        end, middle = scale(bar.value), top + row / 2
        text = escape(bar.text if bar.text is not None else short(bar.value))
        parts.append(
            f"<g><title>{escape(bar.label)}: {text}</title>"
            f'<text x="{label_width - 8}" y="{xy(middle + 4)}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect class="f{bar.colour % COLOURS}" opacity=".85" rx="2" x="{label_width}" y="{top + 4}" '
            f'width="{xy(max(0.0, end - label_width))}" height="{row - 8}"/>'
        )
        if bar.interval is not None:
            left, right = xy(scale(bar.interval[0])), xy(scale(bar.interval[1]))
            parts.append(
                f'<path class="a" fill="none" d="M{left} {xy(middle)}H{right}M{left} {top + 8}v8M{right} {top + 8}v8"/>'
            )
            end = max(end, scale(bar.interval[1]))
        if bar.reference is not None:
            at = xy(scale(bar.reference))
            parts.append(f'<line class="s1" stroke-width="2" x1="{at}" x2="{at}" y1="{top + 2}" y2="{top + row - 2}"/>')
        parts.append(f'<text class="v" x="{xy(end + 6)}" y="{xy(middle + 4)}">{text}</text></g>')
    return svg(title, width, head + row * len(known) + 6, "".join(parts))
