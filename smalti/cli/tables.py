"""Prints the results of commands: aligned plain text for people, JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: columns are as wide as their widest cell, two blanks apart; numbers are right-aligned."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print a table, or ``empty`` where there are no rows."""
    print(table(head, rows) if rows else empty)


def pairs(values: Sequence[tuple[str, str]]) -> str:
    """Return ``name   value`` lines with the values aligned."""
    width = max(len(name) for name, _ in values)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in values)


def print_json(value: Any) -> None:
    """Print indented JSON."""
    print(json.dumps(value, indent=2))


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] == "-" and cell[1:2].isdigit())
