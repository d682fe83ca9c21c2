"""Title, legend and axes around a plot; colours and SVG text, which all charts share.

Colours, a light and a dark set, are CSS variables in ``CSS``.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from smalti.base.chart.axis import Scale, short

CSS = """
:root{color-scheme:light dark;--chart-ink:#22272e;--chart-soft:#68727d;--chart-grid:#e4e7eb;--chart-paper:#fff;
--c0:#2f6db5;--c1:#d1731f;--c2:#25896b;--c3:#a8478b;--c4:#8a7414;--c5:#6459c4;--c6:#c0433b;--c7:#5b6876}
@media(prefers-color-scheme:dark){:root{--chart-ink:#e3e7ec;--chart-soft:#98a2ad;--chart-grid:#2c333b;
--chart-paper:#161a1f;--c0:#6ea8e6;--c1:#eb9f52;--c2:#57bd9b;--c3:#dc83bf;--c4:#c9b54c;--c5:#a69cf0;--c6:#ee837b;
--c7:#9dadbc}}
.chart{display:block;width:100%;height:auto;font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
.chart text{fill:var(--chart-soft)}.chart .t{fill:var(--chart-ink);font-size:13px;font-weight:600}
.chart .v{fill:var(--chart-ink)}.chart .g{stroke:var(--chart-grid);stroke-width:1}
.chart .a{stroke:var(--chart-soft);stroke-width:1}
.chart .l{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{opacity:.28;stroke-width:1}.chart .dashed{stroke-dasharray:6 4;stroke-width:1.25}
.chart .family{stroke-width:1}.chart .e{paint-order:stroke;stroke:var(--chart-paper);stroke-width:3px}
.chart .m{stroke:var(--chart-soft);stroke-dasharray:3 3}.chart .h rect{fill:transparent}
.chart .h line,.chart .h circle{opacity:0}.chart .h:hover line,.chart .h:hover circle{opacity:1}
.chart .p{fill:var(--chart-paper)}.chart .q0{fill:var(--chart-ink)}.chart .q1{fill:var(--c0)}
.chart .q2{fill:var(--c0);fill-opacity:.6}.chart .q3{fill:var(--c0);fill-opacity:.28}.chart .q4{fill:var(--chart-grid)}
.chart .q5{fill:var(--c1);fill-opacity:.32}.chart .q6{fill:var(--c1);fill-opacity:.75}.chart .q7{fill:var(--c6)}
""" + "".join(f".chart .s{i}{{stroke:var(--c{i})}}.chart .f{i}{{fill:var(--c{i})}}\n" for i in range(8))
"""Style of all charts; a page includes it once."""

COLOURS = 8
_LEFT, _RIGHT, _BOTTOM = 56, 14, 38


def column(charts: Sequence[str], *, title: str, gap: int = 14) -> str:
    """Combine charts of this module into one, one above the other."""
    parts, width, top = [], 0, 0
    for chart in charts:
        _, _, wide, high = (int(value) for value in chart.partition('viewBox="')[2].partition('"')[0].split())
        # without its class, whose height would take the place of the one given here
        parts.append(chart.replace('<svg class="chart"', f'<svg y="{top}" width="{wide}" height="{high}"', 1))
        width, top = max(width, wide), top + high + gap
    return svg(title, width, top - gap, "".join(parts))


def standalone(svg: str) -> str:
    """Return a chart as the text of an SVG file, with the style inside."""
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(CSS, quote=False)}</style>{rest}'


class Frame:
    """Title, legend and axes around a plot; ``names``: those of the legend, with their CSS classes."""

    def __init__(self, title: str, width: int, height: int, names: Sequence[tuple[str, str]]) -> None:
        self.title, self.width, self.height = title, width, height
        self._legend, rows = _legend(names, width) if len(names) > 1 else ("", 0)
        self.left, self.right = _LEFT, width - _RIGHT
        self.top, self.bottom = 30 + 18 * rows, height - _BOTTOM

    def axes(self, x: Scale, y: Scale, x_label: str, format_y: Callable[[float], str], *, with_x: bool = True) -> str:
        parts = []
        for value in y.ticks(4):
            at = xy(y(value))
            parts.append(f'<line class="g" x1="{self.left}" x2="{self.right}" y1="{at}" y2="{at}"/>')
            parts.append(
                f'<text x="{self.left - 7}" y="{xy(y(value) + 4)}" text-anchor="end">{escape(format_y(value))}</text>'
            )
        for value in x.ticks(7) if with_x else ():
            parts.append(f'<text x="{xy(x(value))}" y="{self.bottom + 16}" text-anchor="middle">{short(value)}</text>')
        parts.append(f'<line class="a" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        if x_label:
            middle = (self.left + self.right) // 2
            parts.append(f'<text x="{middle}" y="{self.bottom + 32}" text-anchor="middle">{escape(x_label)}</text>')
        return "".join(parts)

    def empty(self) -> str:
        text = f'<text x="{self.width // 2}" y="{(self.top + self.bottom) // 2}" text-anchor="middle">no data</text>'
        return self.wrap(text)

    def wrap(self, body: str) -> str:
        head = f'<text class="t" x="0" y="14">{escape(self.title)}</text>{self._legend}'
        return svg(self.title, self.width, self.height, head + body)


def svg(title: str, width: int, height: int, body: str) -> str:
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}">{body}</svg>'


def _legend(names: Sequence[tuple[str, str]], width: int) -> tuple[str, int]:
    parts, at, row = [], _LEFT, 0
    for name, style in names:
        wide = 26 + round(6.2 * len(name))
        if at + wide > width and at > _LEFT:
            at, row = _LEFT, row + 1
        y = 30 + 18 * row
        parts.append(f'<rect class="{style}" x="{at}" y="{y - 4}" width="12" height="4" rx="2"/>')
        parts.append(f'<text x="{at + 17}" y="{y + 2}">{escape(name)}</text>')
        at += wide
    return "".join(parts), row + 1


def finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def xy(value: float) -> str:
    """Return a pixel coordinate as text: at most two decimals, no trailing zeros, no -0."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
