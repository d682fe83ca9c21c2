"""Tables of a run's checkpoints, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.units import format_bytes, format_count, format_seconds
from smalti.cli.tables import table

_COLUMNS = ("step", "saved (UTC)", "tokens", "size", "blocked", "verified (UTC)", "parent", "kept as")
_COMPACT = ("step", "saved (UTC)", "tokens", "size", "kept as")
_ROLES = ("newest", "last", "best", "every", "blessed", "registered", "protected")


def checkpoint_table(checkpoints: Sequence[Mapping[str, Any]], *, compact: bool = False) -> str:
    """Return a table of checkpoints (``CheckpointFacts.to_json``), with the places of copies below it."""
    names = _COMPACT if compact else _COLUMNS
    rows = [_row(checkpoint) for checkpoint in checkpoints]
    lines = [table(("checkpoint", *names[1:]), [[row[name] for name in names] for row in rows])]
    lines += [
        f"copy of {each['step']}: {place}" for each in checkpoints for place in each["locations"][int(each["here"]) :]
    ]
    return "\n".join(lines)


def _row(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    def known(key: str, write: Any) -> str:
        return "-" if checkpoint[key] is None else str(write(checkpoint[key]))

    return {
        "step": str(checkpoint["step"]),
        "saved (UTC)": known("saved", _time),
        "tokens": known("tokens", format_count),
        "size": known("bytes", format_bytes),
        "blocked": known("block_s", format_seconds),
        "verified (UTC)": known("verified", _time),
        "parent": known("parent", str),
        "kept as": ", ".join(
            [*(role for role in _ROLES if checkpoint[role]), *(() if checkpoint["here"] else ("copy",))]
        ),
    }


def _time(utc: str) -> str:
    return utc[:19].replace("T", " ")
