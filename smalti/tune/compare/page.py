"""The HTML page of a comparison: quality against cost, the tables, what was lost. All text is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any

from smalti.base.chart import Cross, Series, line_chart
from smalti.base.units import format_frac
from smalti.track.report.html import document, row, table
from smalti.tune.compare import words
from smalti.tune.compare.questions import ANSWERS, LIKELIHOOD

_ANSWERS = [10.0**exponent for exponent in range(7)]
"""Numbers of answers of the plot of costs."""
_WIDTH, _HEIGHT = 480, 300


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    sections = (
        f"<header><h1>Ways to tune {escape(str(result['model']))}</h1>"
        f'<p class="note">{escape(result["recipe"])}, {result["time"]}</p></header>',
        _plots(result),
        _table("Quality", words.QUALITY, words.quality_rows(result)),
        "".join(f'<p class="note">{escape(note)}</p>' for note in words.notes(result)),
        _table("Cost", words.COST, words.cost_rows(result)),
        _table("What was lost", words.LOST, words.lost_rows(result)),
        "<footer>Written by <code>smalti tune compare</code>.</footer>",
    )
    return document("Ways to tune - Smalti", sections)


def _plots(result: Mapping[str, Any]) -> str:
    ways = result["ways"]
    figures = []
    for task, title in (
        (LIKELIHOOD, "Bits per byte of the right answers (lower is better)"),
        (ANSWERS, "Exact answers"),
    ):
        scores = {way: entry["scores"][task] for way, entry in ways.items() if task in entry["scores"]}
        if scores:
            figures.append(_against_cost(title, ways, scores))
    figures.append(_costs(ways))
    return f'<h2>Quality and cost</h2><div class="grid">{"".join(f"<figure>{f}</figure>" for f in figures)}</div>'


def _against_cost(title: str, ways: Mapping[str, Any], scores: Mapping[str, Any]) -> str:
    series, crosses = [], []
    for colour, (way, score) in enumerate(scores.items()):
        cost = ways[way]["cost"]
        x = cost["train_flops"] + 1000 * cost["answer_flops"]
        interval = tuple(score["interval"]) if score["interval"] else None
        series.append(Series(way, [x], [score["value"]], colour=colour))
        if interval is not None:  # a thin line, as whiskers do not extend the axis
            series.append(Series("", [x, x], interval, faint=True, colour=colour))
        crosses.append(Cross(x, score["value"], f"{way}: {score['value']:.4g}", y_interval=interval, colour=colour))
    is_share = title == "Exact answers"
    return line_chart(
        series,
        crosses=crosses,
        title=title,
        x_label="FLOPs of training and 1,000 answers",
        log_x=True,
        format_y=format_frac if is_share else None,
        width=_WIDTH,
        height=_HEIGHT,
    )


def _costs(ways: Mapping[str, Any]) -> str:
    series = [
        Series(way, _ANSWERS, [entry["cost"]["train_flops"] + n * entry["cost"]["answer_flops"] for n in _ANSWERS])
        for way, entry in ways.items()
    ]
    title = "FLOPs of training and all answers"
    return line_chart(series, title=title, x_label="answers", log_x=True, log_y=True, width=_WIDTH, height=_HEIGHT)


def _table(title: str, head: tuple[str, ...], rows: list[words.Cells]) -> str:
    if not rows:
        return ""
    columns = [(name, "k v" if number == 0 else "n") for number, name in enumerate(head)]
    return f"<h2>{title}</h2>" + table(columns, "".join(row(columns, cells) for cells in rows))
