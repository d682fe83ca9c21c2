"""The HTML page of a comparison of versions: loss curves and the tables. All text is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any

from smalti.base.chart import Cross, Marker, Series, line_chart
from smalti.evals.data_value import words
from smalti.evals.data_value.result import MEAN, losses, mean_curve
from smalti.track.report.html import document, row, table

_WIDTH, _HEIGHT = 640, 320


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    folders = [f"{escape(entry['folder'])} ({name})" for name, entry in result["versions"].items()]
    sections = [
        f"<header><h1>{', '.join(folders[:-1])} and {folders[-1]}</h1>"
        f'<p class="note">{escape(result["model"])}, {result["time"]}</p></header>',
        "".join(f"<p>{escape(verdict)}</p>" for verdict in words.verdicts(result)),
        f'<h2>Loss</h2><div class="grid">{"".join(map(_figure, _charts(result)))}</div>',
        _table("Held-out bits per byte (less is better)", words.score_head(result), words.score_rows(result)),
        _table("Differences", words.DIFFERENCES, words.difference_rows(result)),
    ]
    for worth in filter(None, (pair["worth"] for pair in result["pairs"])):
        sections.append(_table("Tokens for the same loss", words.worth_head(worth), words.worth_rows(worth)))
    sections += [
        _table("Versions", words.SETS, words.set_rows(result)),
        "".join(f'<p class="note">{escape(note)}</p>' for note in words.notes(result)),
        "<footer>Written by <code>smalti data compare</code>.</footer>",
    ]
    return document("The value of data - Smalti", sections)


def _charts(result: Mapping[str, Any]) -> list[str]:
    names = list(result["scores"])
    names.sort(key=lambda name: name != result["main"])
    return [_chart(result, name) for name in names]


def _chart(result: Mapping[str, Any], name: str) -> str:
    """Draw the mean curves, the runs behind them, and the ends with their intervals."""
    curves, series, crosses = result["curves"], [], []
    for colour, version in enumerate(curves):
        tokens = curves[version][0]["tokens"]
        series.append(Series(version, tokens, mean_curve(curves, version, name), colour=colour))
        series += [Series("", tokens, losses(run, name), faint=True, colour=colour) for run in curves[version]]
        end = result["scores"][name][version]
        low, high = end["interval"]
        label = f"{version}: {end['value']:.4f} ({low:.4f} to {high:.4f})"
        crosses.append(Cross(tokens[-1], end["value"], label, y_interval=(low, high), colour=colour))
    worth, markers = result["pairs"][0]["worth"], []
    if worth is not None and name == result["main"] and len(result["pairs"]) == 1:
        text = f"{worth['better']} has the final loss of {worth['worse']}"
        markers.append(Marker(worth["equal_tokens"], text))
    title = "Bits per byte, mean of the held-out sets" if name == MEAN else f"Bits per byte of held-out text: {name}"
    return line_chart(
        series, crosses=crosses, markers=markers, title=title, x_label="training tokens", width=_WIDTH, height=_HEIGHT
    )


def _figure(chart: str) -> str:
    return f"<figure>{chart}</figure>"


def _table(title: str, head: words.Cells, rows: list[words.Cells]) -> str:
    columns = [(name, "k v" if number == 0 else "n") for number, name in enumerate(head)]
    return f"<h2>{title}</h2>" + table(columns, "".join(row(columns, cells) for cells in rows))
