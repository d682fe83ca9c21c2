"""The HTML page of a comparison of versions: loss curves and the tables. All text is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any

from smalti.evals.data_value import words
from smalti.evals.data_value.charts import difference_chart, labels, loss_chart
from smalti.track.report.html import document, row, table, wide_and_narrow

_WIDE, _NARROW, _HEIGHT = 1040, 360, 320
_TEXTS = {"held-out text", "folder", words.VERDICT}
"""Columns of text, which is aligned left; all others are numbers."""


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    folders = [f"{escape(entry['folder'])} ({name})" for name, entry in result["versions"].items()]
    sections = [
        f"<header><h1>{', '.join(folders[:-1])} and {folders[-1]}</h1>"
        f'<p class="note">{escape(result["model"])}, {result["time"]}</p></header>',
        f"<p>{escape(words.verdict(result) or '')}</p>",
        f"<h2>Loss</h2>{_charts(result)}",
        _table("Held-out bits per byte (less is better)", words.score_head(result), words.score_rows(result)),
        _table("Differences", words.DIFFERENCES, words.difference_rows(result)),
    ]
    if (worth := words.worth_of_two(result)) is not None:
        sections.append(_table("Tokens for the same loss", words.worth_head(worth), words.worth_rows(worth)))
    sections += [
        _table("Versions", words.SETS, words.set_rows(result)),
        "".join(f'<p class="note">{escape(note)}</p>' for note in words.notes(result)),
        "<footer>Written by <code>smalti data compare</code>.</footer>",
    ]
    return document("The value of data - Smalti", sections)


def _charts(result: Mapping[str, Any]) -> str:
    """Draw both plots of the held-out text that decides, and the losses on the others in a grid."""
    names, main = labels(result), result["main"]
    large = [
        wide_and_narrow(*(draw(result, main, names, width=width, height=_HEIGHT) for width in (_WIDE, _NARROW)))
        for draw in (loss_chart, difference_chart)
    ]
    others = [
        loss_chart(result, name, names, width=_WIDE // 2, height=_HEIGHT * 3 // 4)
        for name in result["scores"]
        if name != main
    ]
    grid = f'<div class="grid below">{"".join(map(_figure, others))}</div>' if others else ""
    note = "Thin lines: each seed. Vertical lines at the end: 95 % intervals."
    if words.worth_of_two(result) is not None:
        note += " Dashed: the better version has the final loss of the worse one."
    return (
        "".join(f'<div class="below">{_figure(chart)}</div>' for chart in large) + grid + f'<p class="note">{note}</p>'
    )


def _figure(chart: str) -> str:
    return f"<figure>{chart}</figure>"


def _table(title: str, head: words.Cells, rows: list[words.Cells]) -> str:
    columns = [(name, "k v" if number == 0 else "k" if name in _TEXTS else "n") for number, name in enumerate(head)]
    return f"<h2>{title}</h2>" + table(columns, "".join(row(columns, cells) for cells in rows))
