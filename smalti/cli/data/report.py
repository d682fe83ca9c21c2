"""Prints the report of a job that prepares data."""

from collections.abc import Sequence
from typing import Any, Protocol

from smalti.cli.tables import print_json, table


class JobReport(Protocol):
    """The report of ``curate``, ``dedup`` or ``tokenize``."""

    def rows(self) -> list[list[str]]: ...
    def as_json(self) -> dict[str, Any]: ...


def print_report(
    report: JobReport,
    columns: Sequence[str],
    as_json: bool,
    *,
    blocks: Sequence[str] = (),
    notes: Sequence[str] = (),
    next_step: str,
) -> None:
    """Print JSON, or the table, further blocks, the notes, and the next command."""
    if as_json:
        print_json(report.as_json())
        return
    print("\n\n".join([table(columns, report.rows()), *blocks]))
    for note in notes:
        print(f"note: {note}")
    print(f"\n{next_step}")
