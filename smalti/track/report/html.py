"""The HTML document of a report and its tables. All text is escaped here; charts are already markup."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape

from smalti.base import chart
from smalti.track.report import style


def document(title: str, sections: Iterable[str], *, script: str = "") -> str:
    """Return a whole page, without fonts or external addresses; ``script`` is the only one that may run in it."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if script:
        policy += f"; script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{chart.CSS}{style.CSS}</style></head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + (f"\n<script>{script}</script>" if script else "")
        + "\n</body></html>\n"
    )


def table(columns: Sequence[tuple[str, str]], rows: str) -> str:
    """Return a table with a head; in a narrow window each row becomes lines of ``column: cell`` (``style.CSS``)."""
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def row(columns: Sequence[tuple[str, str]], cells: Sequence[str]) -> str:
    """Return a row of ``table``. Each cell has the name of its column as attribute, for narrow windows."""
    named = zip(columns, cells, strict=True)
    return "<tr>" + "".join(f'<td class="{k}" data-of="{escape(n)}">{escape(c)}</td>' for (n, k), c in named) + "</tr>"


def wide_and_narrow(wide: str, narrow: str) -> str:
    """Return both sizes of a chart, of which CSS shows one: on a phone the text of the wide one is too small."""
    return f'<div class="at-wide">{wide}</div><div class="at-narrow">{narrow}</div>'
