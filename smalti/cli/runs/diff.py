"""The tables of ``smalti runs diff``: differences, and for measured numbers whether they exceed the noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.units import format_count, format_frac, format_seconds
from smalti.cli.tables import table
from smalti.track.compare.comparison import Comparison, value_text
from smalti.track.compare.differences import Difference

_LONGEST = 60
_NOTE = (
    "The noise is that of batches, documents and questions (95 %); two seeds of one config may differ by more.\n"
    "Where the last column is empty, the noise is not known."
)


def comparison_text(comparison: Comparison) -> str:
    """Return all tables, in blocks."""
    blocks = [f"compared with {comparison.names[0]} ({comparison.folders[0]})"]
    for title, rows in (
        ("config, identity", comparison.identity),
        ("config, placement", comparison.placement),
        ("code and machine", comparison.provenance),
    ):
        if rows:
            blocks.append(_values(title, comparison.names, rows))
    if not comparison.identity and not comparison.notes:
        blocks.append("the configs are of the same identity: they describe the same run")
    blocks += [_measured(metrics.where, comparison.names, metrics.rows) for metrics in comparison.measured]
    blocks += [_measured(f"suite {suite}", comparison.names, rows) for suite, rows in comparison.evals.items()]
    blocks += [f"note: {note}" for note in comparison.notes]
    if comparison.measured or comparison.evals:
        blocks.append(_NOTE)
    return "\n\n".join(blocks)


def _values(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> str:
    return table(
        (title, *names),
        [(key, *(value_text(value, longest=_LONGEST) for value in values)) for key, values in rows.items()],
    )


def _measured(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Difference]]) -> str:
    """Return a line for each metric and later run: the first run, the other, their difference, and the verdict."""
    has_several = len(names) > 2
    head = (title, *(("run",) if has_several else ()), names[0], "other" if has_several else names[1], "difference", "")
    lines = []
    for name, row in rows.items():
        for other, difference in zip(names[1:], row, strict=True):
            cells = (
                _number(name, difference.before),
                _number(name, difference.after),
                _difference(name, difference),
                _verdict(difference),
            )
            lines.append((name, *((other,) if has_several else ()), *cells))
    return table(head, lines)


def _difference(name: str, difference: Difference) -> str:
    value = difference.value
    if value is None:
        return "-"
    sign = "+" if value > 0 else "-" if value < 0 else ""
    spread = "" if difference.half_width is None else f" ± {_number(name, difference.half_width)}"
    return f"{sign}{_number(name, abs(value))}{spread}"


def _verdict(difference: Difference) -> str:
    return f"{difference.verdict} ({difference.how})" if difference.verdict and difference.how else difference.verdict


def _number(name: str, value: float | None) -> str:
    """Return a metric, a held-out result or a score as text, in the unit of its table."""
    if value is None:
        return "-"
    if name == "time/train":
        return format_seconds(value * 3600)
    if name.startswith("throughput/device/mfu"):
        return format_frac(value)
    if name in ("time/token", "throughput/tokens_per_sec"):
        return format_count(value)
    return f"{value:.4f}"
