"""A plot of lines over time in rows, with numbered arrows at events and their descriptions below."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from smalti.base.chart.axis import Scale, short
from smalti.base.chart.frame import COLOURS, Frame, finite, svg, xy
from smalti.base.chart.lines import Series, polyline

_ARROWS, _LABEL_WIDTH, _LABEL_ROW = 34, 16, 13
_ROWS_OF_ARROWS = 3
_CHARACTER = 6.1
_LINE = 15


@dataclass(frozen=True)
class Arrow:
    """An event: an arrow at its time, with a number that the list below explains."""

    x: float
    lines: tuple[str, ...]
    """Its description, in lines; the first is in bold."""
    until: float | None = None
    """End of the time that the event took, drawn as a band."""


@dataclass(frozen=True)
class Panel:
    """A row of the plot: lines with an axis of their own."""

    title: str
    series: Sequence[Series]
    log_y: bool = False
    from_zero: bool = False
    format_y: Callable[[float], str] | None = None
    height: int = 150


def timeline(
    panels: Sequence[Panel],
    arrows: Sequence[Arrow],
    *,
    title: str,
    x_label: str,
    x_range: tuple[float, float],
    width: int = 1040,
    more: str = "",
) -> str:
    """Draw panels over one x axis with arrows above them; ``more`` is the last line of the list of descriptions."""
    body, top = [f'<text class="t" x="0" y="14">{escape(title)}</text>'], 22 + _ARROWS
    frame = Frame(title, width, top, [])
    x = Scale(x_range, frame.left, frame.right)
    bottom = top + sum(panel.height for panel in panels)
    body.append(_bands(arrows, x, top, bottom))
    titles = ""
    for panel in panels:
        titles += f'<text class="e" x="{frame.left}" y="{top + 12}">{escape(panel.title)}</text>'
        body.append(_panel(panel, x, frame, top, width, x_label if panel is panels[-1] else ""))
        top += panel.height
    body.append(_arrows(arrows, x, 22 + _ARROWS, bottom - 38))
    body.append(titles)  # over the lines of the arrows
    text, height = _descriptions(arrows, more, top + 14, width)
    return svg(title, width, top + height + 14, "".join(body) + text)


def _panel(panel: Panel, x: Scale, frame: Frame, top: int, width: int, x_label: str) -> str:
    def ok(at: float, y: float) -> bool:
        return finite(at, y) and not (panel.log_y and y <= 0)

    lines = [[(a, b) if ok(a, b) else None for a, b in zip(s.x, s.y, strict=True)] for s in panel.series]
    values = [point[1] for line in lines for point in line if point is not None]
    inside = Frame(panel.title, width, top + panel.height, [])
    inside.top = top + 22
    inside.bottom = top + panel.height - (38 if x_label else 14)
    if not values:
        return f'<text x="{inside.left}" y="{top + 40}">no data</text>'
    values += [0.0] if panel.from_zero and not panel.log_y else []
    y = Scale(values, inside.bottom, inside.top, log=panel.log_y, loose=True)
    axes = inside.axes(x, y, x_label, panel.format_y or short, with_x=bool(x_label))
    drawn = [
        polyline(line, x, y, index if s.colour is None else s.colour, s.style, frame.right - frame.left)
        for index, (s, line) in enumerate(zip(panel.series, lines, strict=True))
    ]
    return axes + "".join(drawn)


def _bands(arrows: Sequence[Arrow], x: Scale, top: int, bottom: int) -> str:
    parts = []
    for arrow in arrows:
        if arrow.until is not None:
            left, right = x(max(x.low, arrow.x)), x(min(x.high, arrow.until))
            wide = xy(max(1.0, right - left))
            parts.append(
                f'<rect class="f6" opacity=".12" x="{xy(left)}" y="{top}" width="{wide}" height="{bottom - 38 - top}"/>'
            )
    return "".join(parts)


def _arrows(arrows: Sequence[Arrow], x: Scale, top: int, bottom: int) -> str:
    """Draw the arrows; a number that would cover the one before it is a row higher, and in the last row left out."""
    parts = []
    ends = [-math.inf] * _ROWS_OF_ARROWS
    for number, arrow in enumerate(arrows, start=1):
        at = x(arrow.x)
        wide = max(_LABEL_WIDTH, _CHARACTER * len(str(number)) + 6)
        row = next((row for row, end in enumerate(ends) if at - wide / 2 >= end), None)
        tip, up = xy(at), top - 4 - _LABEL_ROW * (row or 0)
        parts.append(
            f"<g><title>{escape(chr(10).join(arrow.lines))}</title>"
            f'<line class="m" x1="{tip}" x2="{tip}" y1="{up}" y2="{bottom}"/>'
            f'<path class="f6" d="M{xy(at - 4)} {top - 2}h8l-4 7z"/>'
        )
        if row is not None:
            ends[row] = at + wide / 2
            parts.append(f'<text class="v e" x="{tip}" y="{up - 2}" text-anchor="middle">{number}</text>')
        parts.append("</g>")
    return "".join(parts)


def _descriptions(arrows: Sequence[Arrow], more: str, top: int, width: int) -> tuple[str, int]:
    """Return the numbered list and its height; long lines are wrapped."""
    limit = max(20, int((width - 40) / _CHARACTER))
    parts, at = [], top
    for number, arrow in enumerate(arrows, start=1):
        parts.append(f'<text class="f{6 % COLOURS}" x="16" y="{at}" text-anchor="end">{number}</text>')
        for index, line in enumerate(arrow.lines):
            for text in _wrapped(line, limit):
                style = ' class="v"' if index == 0 else ""
                parts.append(f'<text{style} x="26" y="{at}">{escape(text)}</text>')
                at += _LINE
        at += 3
    for text in _wrapped(more, limit):
        parts.append(f'<text x="26" y="{at}">{escape(text)}</text>')
        at += _LINE
    return "".join(parts), at - top


def _wrapped(text: str, limit: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= limit:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
