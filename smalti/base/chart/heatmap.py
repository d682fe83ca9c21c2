"""A heatmap of ratios: one row for each item, one column for each span of x, a colour for each range around 1."""

import itertools
import math
from collections.abc import Sequence
from html import escape

from smalti.base.chart.axis import Scale, short
from smalti.base.chart.frame import Frame, finite, xy

_LEVELS = (
    ("0", 0.0),
    ("≤0.25", 0.25),
    ("≤0.5", 0.5),
    ("≤0.8", 0.8),
    ("≤1.25", 1.25),
    ("≤2", 2.0),
    ("≤4", 4.0),
    (">4", math.inf),
)
"""Name and upper end (inclusive) of each range, whose colour is the class ``q<number>`` of ``CSS``."""
_CELLS = 6000
"""Most cells, unless there are more than 250 rows: more columns than fit are merged."""
_COLUMNS = (24, 120)
_NAMED = 6


def heatmap(
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    *,
    title: str,
    row_name: str,
    x_label: str = "",
    width: int = 720,
    height: int = 260,
) -> str:
    """Draw ``rows[i]``, the ratios of item i at each x (ascending, above 0), with item 0 at the top.

    A column is from the x before it to its own. Neighbours are merged, by their mean, to at most 120 columns, and fewer
    for many rows. Hovering shows the largest values of a column, and the items at 0. Columns with a value
    that is not finite are left out; without any other: "no data".
    """
    frame = Frame(title, width, height, [(name, f"q{level}") for level, (name, _) in enumerate(_LEVELS)])
    known = [(at, column) for at, column in zip(x, zip(*rows, strict=True), strict=True) if finite(at, *column)]
    if not known:
        return frame.empty()
    ends, columns = _merged(known)
    x_scale = Scale([0.0, ends[-1]], frame.left, frame.right)
    y_scale = Scale([-0.5, len(rows) - 0.5], frame.top, frame.bottom)
    edges = [x_scale(at) for at in (0.0, *ends)]
    paths = [""] * len(_LEVELS)
    for item in range(len(rows)):
        top, bottom = xy(y_scale(item - 0.5)), xy(y_scale(item + 0.5))
        begin = 0
        for level, cells in itertools.groupby(_level(column[item]) for column in columns):
            end = begin + len(list(cells))
            paths[level] += f"M{xy(edges[begin])} {top}H{xy(edges[end])}V{bottom}H{xy(edges[begin])}z"
            begin = end
    cells_svg = "".join(f'<path class="q{level}" d="{path}"/>' for level, path in enumerate(paths) if path)
    axes = frame.axes(x_scale, y_scale, x_label, lambda item: short(item) if item == int(item) else "")
    spans = zip(itertools.pairwise((0.0, *ends)), itertools.pairwise(edges), columns, strict=True)
    hovers = "".join(
        f'<g class="h"><title>{escape(_words(span, column, row_name, x_label))}</title><rect x="{xy(left)}" '
        f'y="{frame.top}" width="{xy(right - left)}" height="{frame.bottom - frame.top}"/></g>'
        for span, (left, right), column in spans
    )
    area = f"M{frame.left} {frame.top}H{frame.right}V{frame.bottom}H{frame.left}z"  # covers the grid lines
    # without antialiasing, which would draw the edges between cells
    body = f'<g shape-rendering="crispEdges"><path class="p" d="{area}"/>{cells_svg}</g>'
    return frame.wrap(axes + body + hovers)


def _merged(known: Sequence[tuple[float, tuple[float, ...]]]) -> tuple[list[float], list[list[float]]]:
    """Return the end and the mean values of each drawn column."""
    stride = math.ceil(len(known) / min(max(_CELLS // len(known[0][1]), _COLUMNS[0]), _COLUMNS[1]))
    groups = [known[begin : begin + stride] for begin in range(0, len(known), stride)]
    means = [[sum(values) / len(group) for values in zip(*(c for _, c in group), strict=True)] for group in groups]
    return [group[-1][0] for group in groups], means


def _level(value: float) -> int:
    return next(level for level, (_, end) in enumerate(_LEVELS) if value <= end)


def _words(span: tuple[float, float], column: Sequence[float], row_name: str, x_label: str) -> str:
    largest = sorted(range(len(column)), key=lambda item: -column[item])[:_NAMED]
    zeros = [str(item) for item, value in enumerate(column) if value == 0]
    lines = [f"{x_label or 'x'} {short(span[0])} to {short(span[1])}"]
    lines += [f"{row_name} {item}: {column[item]:.3g}" for item in largest if column[item] > 0]
    if zeros:
        more = f" and {len(zeros) - _NAMED} more" if len(zeros) > _NAMED else ""
        lines.append(f"at 0: {row_name} {', '.join(zeros[:_NAMED])}{more}")
    return "\n".join(lines)
