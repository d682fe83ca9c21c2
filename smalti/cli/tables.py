"""How commands answer on stdout: aligned plain text for people, JSON for programs. No colour, no lines to strip."""

import json
from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two blanks between; a column of figures is set to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    figures = [bool(rows) and all(_is_figure(cell) for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, figures, strict=True)
        ).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the line ``empty`` where there is no row."""
    print(table(head, rows) if rows else empty)


def pairs(values: Sequence[tuple[str, str]]) -> str:
    """``name   value`` lines with the values under each other."""
    width = max(len(name) for name, _ in values)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in values)


def print_json(value: Any) -> None:
    """Print indented JSON."""
    print(json.dumps(value, indent=2))


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] == "-" and cell[1:2].isdigit())
