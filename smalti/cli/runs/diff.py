"""What ``smalti runs diff`` prints: tables of what differs, and of measured numbers whether that is more than noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.units import format_count, format_frac, format_seconds
from smalti.cli.tables import table
from smalti.track.compare.comparison import Comparison, value_text
from smalti.track.compare.differences import Difference

_LONGEST = 60
_NOTE = (
    "The noise is that of batches, documents and questions (95 %); two seeds of one config may be further apart.\n"
    "Without a word there: what was measured does not tell its noise."
)


def comparison_text(found: Comparison) -> str:
    """All tables, in blocks."""
    blocks = [f"against {found.names[0]} ({found.folders[0]})"]
    for title, rows in (
        ("config, identity", found.identity),
        ("config, placement", found.placement),
        ("code and machine", found.provenance),
    ):
        if rows:
            blocks.append(_values(title, found.names, rows))
    if not found.identity and not found.notes:
        blocks.append("the configs are of the same identity: they describe the same run")
    blocks += [_measured(one.where, found.names, one.rows) for one in found.measured]
    blocks += [_measured(f"suite {suite}", found.names, rows) for suite, rows in found.evals.items()]
    blocks += [f"note: {note}" for note in found.notes]
    if found.measured or found.evals:
        blocks.append(_NOTE)
    return "\n\n".join(blocks)


def _values(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> str:
    return table(
        (title, *names), [(key, *(value_text(one, longest=_LONGEST) for one in values)) for key, values in rows.items()]
    )


def _measured(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Difference]]) -> str:
    """One line for each metric and later run: the first, the other, how far apart, and whether that is noise."""
    several = len(names) > 2
    head = (title, *(("run",) if several else ()), names[0], "other" if several else names[1], "difference", "")
    lines = []
    for name, row in rows.items():
        for other, one in zip(names[1:], row, strict=True):
            cells = (_number(name, one.before), _number(name, one.after), _apart(name, one), _verdict(one))
            lines.append((name, *((other,) if several else ()), *cells))
    return table(head, lines)


def _apart(name: str, one: Difference) -> str:
    value = one.value
    if value is None:
        return "-"
    sign = "+" if value > 0 else "-" if value < 0 else ""
    spread = "" if one.half_width is None else f" ± {_number(name, one.half_width)}"
    return f"{sign}{_number(name, abs(value))}{spread}"


def _verdict(one: Difference) -> str:
    return f"{one.verdict} ({one.how})" if one.verdict and one.how else one.verdict


def _number(name: str, value: float | None) -> str:
    """A metric, a held-out result or a score in the unit that its table has; bare where the name says it all."""
    if value is None:
        return "-"
    if name == "time/train":
        return format_seconds(value * 3600)
    if name.startswith("throughput/device/mfu"):
        return format_frac(value)
    if name in ("time/token", "throughput/tokens_per_sec"):
        return format_count(value)
    return f"{value:.4f}"
