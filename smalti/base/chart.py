"""Draws charts as SVG text, without dependencies or scripts; draws all plots of Smalti.

Equal input gives equal text. Labels are escaped. Colours, a light and a dark set, are CSS variables in ``CSS``, which a
page includes once (``standalone`` includes it in a single chart). Hovering shows the values of the nearest point.
Points that are not finite interrupt a line.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from smalti.base.axis import Scale, percent, short

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
""" + "".join(f".chart .s{i}{{stroke:var(--c{i})}}.chart .f{i}{{fill:var(--c{i})}}\n" for i in range(8))
"""Style of all charts; a page includes it once."""

_COLOURS = 8
_HOVERS = 120
_LEFT, _RIGHT, _BOTTOM = 56, 14, 38


@dataclass(frozen=True)
class Series:
    """A named line; ``x`` ascending, as long as ``y``. Values that are not finite are gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    """Drawn thin, without legend and hover: raw values behind a smoothed line."""
    dashed: bool = False
    """Drawn with gaps, without legend and hover: a bound."""
    colour: int | None = None
    """Number of one of the eight colours; None: the next."""
    named_at_end: bool = False
    """Named at its last point instead of in the legend: one of a family of lines."""

    @property
    def is_plain(self) -> bool:
        """True for a line with an entry in the legend and hover values."""
        return not (self.faint or self.dashed or self.named_at_end)

    @property
    def style(self) -> str:
        """CSS classes in addition to those of every line."""
        return " faint" * self.faint + " dashed" * self.dashed + " family" * self.named_at_end


@dataclass(frozen=True)
class Marker:
    """A vertical dashed line with a hover title."""

    x: float
    label: str


@dataclass(frozen=True)
class Cross:
    """A point with intervals, drawn over the lines; it must be inside their range."""

    x: float
    y: float
    label: str
    """Hover title."""
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None
    colour: int = 6


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


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    markers: Sequence[Marker] = (),
    crosses: Sequence[Cross] = (),
    format_y: Callable[[float], str] | None = None,
    width: int = 720,
    height: int = 280,
) -> str:
    """Draw lines over a common x axis. ``log_x`` and ``log_y`` drop points at or below 0; without points: "no data"."""

    def ok(x: float, y: float) -> bool:
        return _finite(x, y) and not (log_x and x <= 0) and not (log_y and y <= 0)

    clean = [[(x, y) if ok(x, y) else None for x, y in zip(s.x, s.y, strict=True)] for s in series]
    points = [point for line in clean for point in line if point is not None]
    colours = [index if s.colour is None else s.colour for index, s in enumerate(series)]
    frame = _Frame(title, width, height, [(s.name, c) for s, c in zip(series, colours, strict=True) if s.is_plain])
    if not points:
        return frame.empty()
    y_values = [y for _, y in points] + ([0.0] if from_zero and not log_y else [])
    x_scale = Scale([x for x, _ in points], frame.left, frame.right, log=log_x)
    y_scale = Scale(y_values, frame.bottom, frame.top, log=log_y, loose=True)
    write_y = format_y or short
    body = [frame.axes(x_scale, y_scale, x_label, write_y)]
    hovered: list[tuple[int, str, list[tuple[float, float]]]] = []
    names: list[str] = []
    for s, line, colour in zip(series, clean, colours, strict=True):
        body.append(_polyline(line, x_scale, y_scale, colour, s.style, frame.right - frame.left))
        if s.named_at_end:
            names.append(_end_name(line, s.name, x_scale, y_scale, frame))
        if s.is_plain:
            hovered.append((colour, s.name, [point for point in line if point is not None]))
    for marker in markers:
        if x_scale.low <= marker.x <= x_scale.high:
            at = _n(x_scale(marker.x))
            body.append(
                f'<g><title>{escape(marker.label)}</title><line class="m" x1="{at}" x2="{at}" '
                f'y1="{frame.top}" y2="{frame.bottom}"/></g>'
            )
    body += names  # over all lines
    body.append(_hovers(hovered, x_scale, y_scale, frame, x_label, write_y))
    body += [_cross(cross, x_scale, y_scale) for cross in crosses]
    return frame.wrap("".join(body))


def stacked_area(
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str = "",
    colours: Sequence[int] | None = None,
    width: int = 720,
    height: int = 220,
) -> str:
    """Draw shares of a whole over x: at each x the layers are scaled to sum to 1; an x with sum 0 is dropped."""
    rows = [(at, [max(0.0, values[i]) for values in layers.values()]) for i, at in enumerate(x)]
    rows = [(at, row) for at, row in rows if _finite(at, *row) and sum(row) > 0]
    chosen = list(colours) if colours is not None else list(range(len(layers)))
    frame = _Frame(title, width, height, list(zip(layers, chosen, strict=True)))
    if not rows:
        return frame.empty()
    x_scale = Scale([at for at, _ in rows], frame.left, frame.right)
    y_scale = Scale([0.0, 1.0], frame.bottom, frame.top)
    if (stride := len(rows) // 400) > 1:
        rows = [*rows[:-1:stride], rows[-1]]
    bounds = [(at, [sum(row[:k]) / sum(row) for k in range(len(row) + 1)]) for at, row in rows]
    body = []
    for k, name in enumerate(layers):
        upper = [f"{_n(x_scale(at))},{_n(y_scale(edges[k + 1]))}" for at, edges in bounds]
        lower = [f"{_n(x_scale(at))},{_n(y_scale(edges[k]))}" for at, edges in reversed(bounds)]
        body.append(
            f'<polygon class="f{chosen[k] % _COLOURS}" opacity=".85" points="{" ".join(upper + lower)}">'
            f"<title>{escape(name)}</title></polygon>"
        )
    shares = [
        (chosen[k], name, [(at, edges[k + 1] - edges[k]) for at, edges in bounds]) for k, name in enumerate(layers)
    ]
    axes = frame.axes(x_scale, y_scale, x_label, percent)
    hovers = _hovers(shares, x_scale, y_scale, frame, x_label, percent, dots=False)
    return frame.wrap("".join(body) + axes + hovers)


def bar_chart(bars: Sequence[Bar], *, title: str, low: float = 0.0, high: float | None = None, width: int = 720) -> str:
    """Draw horizontal bars from ``low``, with whiskers for intervals and ticks for references."""
    row, head = 24, 34
    known = [bar for bar in bars if math.isfinite(bar.value)]
    if not known:
        return _Frame(title, width, 90, []).empty()
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
            f'<text x="{label_width - 8}" y="{_n(middle + 4)}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect class="f{bar.colour % _COLOURS}" opacity=".85" rx="2" x="{label_width}" y="{top + 4}" '
            f'width="{_n(max(0.0, end - label_width))}" height="{row - 8}"/>'
        )
        if bar.interval is not None:
            left, right = _n(scale(bar.interval[0])), _n(scale(bar.interval[1]))
            parts.append(
                f'<path class="a" fill="none" d="M{left} {_n(middle)}H{right}M{left} {top + 8}v8M{right} {top + 8}v8"/>'
            )
            end = max(end, scale(bar.interval[1]))
        if bar.reference is not None:
            at = _n(scale(bar.reference))
            parts.append(f'<line class="s1" stroke-width="2" x1="{at}" x2="{at}" y1="{top + 2}" y2="{top + row - 2}"/>')
        parts.append(f'<text class="v" x="{_n(end + 6)}" y="{_n(middle + 4)}">{text}</text></g>')
    return _svg(title, width, head + row * len(known) + 6, "".join(parts))


def column(charts: Sequence[str], *, title: str, gap: int = 14) -> str:
    """Combine charts of this module into one, one above the other."""
    parts, width, top = [], 0, 0
    for svg in charts:
        _, _, wide, high = (int(value) for value in svg.partition('viewBox="')[2].partition('"')[0].split())
        # without its class, whose height would take the place of the one given here
        parts.append(svg.replace('<svg class="chart"', f'<svg y="{top}" width="{wide}" height="{high}"', 1))
        width, top = max(width, wide), top + high + gap
    return _svg(title, width, top - gap, "".join(parts))


def standalone(svg: str) -> str:
    """Return a chart as the text of an SVG file, with the style inside."""
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(CSS, quote=False)}</style>{rest}'


class _Frame:
    """Title, legend and axes around a plot."""

    def __init__(self, title: str, width: int, height: int, names: Sequence[tuple[str, int]]) -> None:
        self.title, self.width, self.height = title, width, height
        self._legend, rows = _legend(names, width) if len(names) > 1 else ("", 0)
        self.left, self.right = _LEFT, width - _RIGHT
        self.top, self.bottom = 30 + 18 * rows, height - _BOTTOM

    def axes(self, x: Scale, y: Scale, x_label: str, format_y: Callable[[float], str]) -> str:
        parts = []
        for value in y.ticks(4):
            at = _n(y(value))
            parts.append(f'<line class="g" x1="{self.left}" x2="{self.right}" y1="{at}" y2="{at}"/>')
            parts.append(
                f'<text x="{self.left - 7}" y="{_n(y(value) + 4)}" text-anchor="end">{escape(format_y(value))}</text>'
            )
        for value in x.ticks(7):
            parts.append(f'<text x="{_n(x(value))}" y="{self.bottom + 16}" text-anchor="middle">{short(value)}</text>')
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
        return _svg(self.title, self.width, self.height, head + body)


def _svg(title: str, width: int, height: int, body: str) -> str:
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}">{body}</svg>'


def _legend(names: Sequence[tuple[str, int]], width: int) -> tuple[str, int]:
    parts, at, row = [], _LEFT, 0
    for name, colour in names:
        wide = 26 + round(6.2 * len(name))
        if at + wide > width and at > _LEFT:
            at, row = _LEFT, row + 1
        y = 30 + 18 * row
        parts.append(f'<rect class="f{colour % _COLOURS}" x="{at}" y="{y - 4}" width="12" height="4" rx="2"/>')
        parts.append(f'<text x="{at + 17}" y="{y + 2}">{escape(name)}</text>')
        at += wide
    return "".join(parts), row + 1


def _polyline(
    line: Sequence[tuple[float, float] | None], x: Scale, y: Scale, colour: int, style: str, pixels: float
) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in line:
        if point is None:
            runs.append([])
        else:
            runs[-1].append((x(point[0]), y(point[1])))
    kind = f"l s{colour % _COLOURS}{style}"
    parts = []
    for run in filter(None, runs):
        if len(run) == 1:
            parts.append(f'<circle class="f{colour % _COLOURS}" cx="{_n(run[0][0])}" cy="{_n(run[0][1])}" r="3"/>')
            continue
        path = "L".join(f"{_n(px)} {_n(py)}" for px, py in _thin(run, int(pixels)))
        parts.append(f'<path class="{kind}" d="M{path}"/>')
    return "".join(parts)


def _end_name(line: Sequence[tuple[float, float] | None], name: str, x: Scale, y: Scale, frame: _Frame) -> str:
    known = [point for point in line if point is not None]
    if not known:
        return ""
    at = x(known[-1][0])
    place = f'x="{_n(at - 4)}" text-anchor="end"' if at > frame.right - 50 else f'x="{_n(at + 4)}"'
    return f'<text class="e" {place} y="{_n(y(known[-1][1]) - 4)}">{escape(name)}</text>'


def _cross(cross: Cross, x: Scale, y: Scale) -> str:
    at, up, colour = _n(x(cross.x)), _n(y(cross.y)), cross.colour % _COLOURS
    path = ""
    if cross.x_interval is not None:
        path += f"M{_n(x(cross.x_interval[0]))} {up}H{_n(x(cross.x_interval[1]))}"
    if cross.y_interval is not None:
        path += f"M{at} {_n(y(cross.y_interval[0]))}V{_n(y(cross.y_interval[1]))}"
    lines = f'<path class="l s{colour}" d="{path}"/>' if path else ""
    return f'<g><title>{escape(cross.label)}</title>{lines}<circle class="f{colour}" cx="{at}" cy="{up}" r="4"/></g>'


def _thin(run: list[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Return at most four points for each pixel column (first, lowest, highest, last), so that no spike is lost."""
    if len(run) <= 2 * columns:
        return run
    by_column: dict[int, list[tuple[float, float]]] = {}
    for point in run:
        by_column.setdefault(int(point[0]), []).append(point)
    thinned: list[tuple[float, float]] = []
    for points in by_column.values():
        extremes = [points[0], min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1]), points[-1]]
        thinned += sorted(dict.fromkeys(extremes))
    return thinned


def _hovers(
    lines: Sequence[tuple[int, str, list[tuple[float, float]]]],
    x: Scale,
    y: Scale,
    frame: _Frame,
    x_label: str,
    format_y: Callable[[float], str],
    *,
    dots: bool = True,
) -> str:
    """Draw invisible strips over the plot: that under the pointer shows a guide, a dot on each line, and a title."""
    places = sorted({point[0] for _, _, line in lines for point in line})
    if len(places) > _HOVERS:
        places = [places[round(i * (len(places) - 1) / (_HOVERS - 1))] for i in range(_HOVERS)]
    edges = [frame.left, *((x(a) + x(b)) / 2 for a, b in itertools.pairwise(places)), frame.right]
    parts = []
    for i, place in enumerate(places):
        texts = [f"{x_label or 'x'} {short(place)}"]
        marks = []
        for colour, name, line in lines:
            near = _nearest(line, place)
            if near is None or not edges[i] - 1 <= x(near[0]) <= edges[i + 1] + 1:
                continue
            texts.append(f"{name}: {format_y(near[1])}" if format_y is not short else f"{name}: {near[1]:.4g}")
            if dots:
                marks.append(
                    f'<circle class="f{colour % _COLOURS}" cx="{_n(x(near[0]))}" cy="{_n(y(near[1]))}" r="3.5"/>'
                )
        at = _n(x(place))
        parts.append(
            f'<g class="h"><title>{escape(chr(10).join(texts))}</title><rect x="{_n(edges[i])}" y="{frame.top}" '
            f'width="{_n(max(0.0, edges[i + 1] - edges[i]))}" height="{frame.bottom - frame.top}"/>'
            f'<line class="a" x1="{at}" x2="{at}" y1="{frame.top}" y2="{frame.bottom}"/>{"".join(marks)}</g>'
        )
    return "".join(parts)


def _nearest(line: list[tuple[float, float]], place: float) -> tuple[float, float] | None:
    if not line:
        return None
    after = bisect_left(line, (place, -math.inf))
    return min(line[max(0, after - 1) : after + 1], key=lambda point: abs(point[0] - place))


def _finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _n(value: float) -> str:
    """Return a pixel coordinate as text: at most two decimals, no trailing zeros, no -0."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
