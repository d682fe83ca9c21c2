"""Lines and stacked areas over a common x axis.

Hovering shows the values of the nearest point. Points that are not finite interrupt a line.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from smalti.base.chart.axis import Scale, percent, short
from smalti.base.chart.frame import COLOURS, Frame, finite, xy

_HOVERS = 120
_NAME_HEIGHT = 12


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
        return finite(x, y) and not (log_x and x <= 0) and not (log_y and y <= 0)

    clean = [[(x, y) if ok(x, y) else None for x, y in zip(s.x, s.y, strict=True)] for s in series]
    points = [point for line in clean for point in line if point is not None]
    colours = [index if s.colour is None else s.colour for index, s in enumerate(series)]
    legend = [(s.name, f"f{c % COLOURS}") for s, c in zip(series, colours, strict=True) if s.is_plain]
    frame = Frame(title, width, height, legend)
    if not points:
        return frame.empty()
    ends = [end for cross in crosses for end in (cross.y, *(cross.y_interval or ())) if ok(cross.x, end)]
    y_values = [y for _, y in points] + ends + ([0.0] if from_zero and not log_y else [])
    x_scale = Scale([x for x, _ in points], frame.left, frame.right, log=log_x)
    y_scale = Scale(y_values, frame.bottom, frame.top, log=log_y, loose=True)
    write_y = format_y or short
    body = [frame.axes(x_scale, y_scale, x_label, write_y)]
    hovered: list[tuple[int, str, list[tuple[float, float]]]] = []
    names: list[tuple[float, float, str, int]] = []
    for s, line, colour in zip(series, clean, colours, strict=True):
        body.append(polyline(line, x_scale, y_scale, colour, s.style, frame.right - frame.left))
        if s.named_at_end and (known := [point for point in line if point is not None]):
            names.append((x_scale(known[-1][0]), y_scale(known[-1][1]), s.name, colour))
        if s.is_plain:
            hovered.append((colour, s.name, [point for point in line if point is not None]))
    for marker in markers:
        if x_scale.low <= marker.x <= x_scale.high:
            at = xy(x_scale(marker.x))
            body.append(
                f'<g><title>{escape(marker.label)}</title><line class="m" x1="{at}" x2="{at}" '
                f'y1="{frame.top}" y2="{frame.bottom}"/></g>'
            )
    body.append(_end_names(names, frame))  # over all lines
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
    rows = [(at, row) for at, row in rows if finite(at, *row) and sum(row) > 0]
    chosen = list(colours) if colours is not None else list(range(len(layers)))
    frame = Frame(title, width, height, [(name, f"f{c % COLOURS}") for name, c in zip(layers, chosen, strict=True)])
    if not rows:
        return frame.empty()
    x_scale = Scale([at for at, _ in rows], frame.left, frame.right)
    y_scale = Scale([0.0, 1.0], frame.bottom, frame.top)
    if (stride := len(rows) // 400) > 1:
        rows = [*rows[:-1:stride], rows[-1]]
    bounds = [(at, [sum(row[:k]) / sum(row) for k in range(len(row) + 1)]) for at, row in rows]
    body = []
    for k, name in enumerate(layers):
        upper = [f"{xy(x_scale(at))},{xy(y_scale(edges[k + 1]))}" for at, edges in bounds]
        lower = [f"{xy(x_scale(at))},{xy(y_scale(edges[k]))}" for at, edges in reversed(bounds)]
        body.append(
            f'<polygon class="f{chosen[k] % COLOURS}" opacity=".85" points="{" ".join(upper + lower)}">'
            f"<title>{escape(name)}</title></polygon>"
        )
    shares = [
        (chosen[k], name, [(at, edges[k + 1] - edges[k]) for at, edges in bounds]) for k, name in enumerate(layers)
    ]
    axes = frame.axes(x_scale, y_scale, x_label, percent)
    hovers = _hovers(shares, x_scale, y_scale, frame, x_label, percent, dots=False)
    return frame.wrap("".join(body) + axes + hovers)


def polyline(
    line: Sequence[tuple[float, float] | None], x: Scale, y: Scale, colour: int, style: str, pixels: float
) -> str:
    """Draw a line with gaps where a point is None."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in line:
        if point is None:
            runs.append([])
        else:
            runs[-1].append((x(point[0]), y(point[1])))
    kind = f"l s{colour % COLOURS}{style}"
    parts = []
    for run in filter(None, runs):
        if len(run) == 1:
            parts.append(f'<circle class="f{colour % COLOURS}" cx="{xy(run[0][0])}" cy="{xy(run[0][1])}" r="3"/>')
            continue
        path = "L".join(f"{xy(px)} {xy(py)}" for px, py in _thin(run, int(pixels)))
        parts.append(f'<path class="{kind}" d="M{path}"/>')
    return "".join(parts)


def _end_names(ends: Sequence[tuple[float, float, str, int]], frame: Frame) -> str:
    """Draw the names of lines beside their last points (x, y, name, colour); one that would cover another is moved."""
    placed: list[tuple[float, float, float]] = []
    parts = []
    for x, y, name, colour in sorted(ends, key=lambda end: -end[1]):
        wide = 6.2 * len(name)
        inside = x > frame.right - 50
        left = x - 4 - wide if inside else x + 4
        near = (y - 4 + sign * i for i in range(frame.bottom) for sign in (-1, 1))
        free = (at for at in near if not any(_covers(left, wide, at, other) for other in placed))
        up = next((at for at in free if frame.top - 4 <= at <= frame.bottom - 2), y - 4)
        placed.append((left, wide, up))
        place = f'x="{xy(x - 4)}" text-anchor="end"' if inside else f'x="{xy(x + 4)}"'
        parts.append(f'<text class="e f{colour % COLOURS}" {place} y="{xy(up)}">{escape(name)}</text>')
    return "".join(parts)


def _covers(left: float, wide: float, at: float, other: tuple[float, float, float]) -> bool:
    return abs(at - other[2]) < _NAME_HEIGHT and left < other[0] + other[1] and other[0] < left + wide


def _cross(cross: Cross, x: Scale, y: Scale) -> str:
    at, up, colour = xy(x(cross.x)), xy(y(cross.y)), cross.colour % COLOURS
    path = ""
    if cross.x_interval is not None:
        path += f"M{xy(x(cross.x_interval[0]))} {up}H{xy(x(cross.x_interval[1]))}"
    if cross.y_interval is not None:
        path += f"M{at} {xy(y(cross.y_interval[0]))}V{xy(y(cross.y_interval[1]))}"
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
    frame: Frame,
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
                    f'<circle class="f{colour % COLOURS}" cx="{xy(x(near[0]))}" cy="{xy(y(near[1]))}" r="3.5"/>'
                )
        at = xy(x(place))
        parts.append(
            f'<g class="h"><title>{escape(chr(10).join(texts))}</title><rect x="{xy(edges[i])}" y="{frame.top}" '
            f'width="{xy(max(0.0, edges[i + 1] - edges[i]))}" height="{frame.bottom - frame.top}"/>'
            f'<line class="a" x1="{at}" x2="{at}" y1="{frame.top}" y2="{frame.bottom}"/>{"".join(marks)}</g>'
        )
    return "".join(parts)


def _nearest(line: list[tuple[float, float]], place: float) -> tuple[float, float] | None:
    if not line:
        return None
    after = bisect_left(line, (place, -math.inf))
    return min(line[max(0, after - 1) : after + 1], key=lambda point: abs(point[0] - place))
