"""The output of ``smalti models`` as text."""

import os
from collections.abc import Sequence

from smalti.base.units import format_count
from smalti.cli.tables import pairs, table
from smalti.track.registry.versions import TagMove, Version

HEAD = ("version", "tags", "kind", "run", "step", "tokens", "registered", "folder")


def row(version: Version) -> tuple[str, ...]:
    """Return the cells of a version under ``HEAD``."""
    return (
        version.label,
        ", ".join(version.tags) or "-",
        f"{version.kind}, {version.weights}" if version.weights else version.kind,
        version.run or "-",
        "-" if version.step is None else str(version.step),
        "-" if version.tokens is None else format_count(version.tokens),
        _minute(version.time),
        f"{version.path}{_mark(version)}",
    )


def about(version: Version, moves: Sequence[TagMove]) -> str:
    """Return all that is known of a version, in blocks; missing facts are left out."""
    facts = [
        ("version", f"models:/{version.label}"),
        ("tags", ", ".join(version.tags)),
        ("kind", version.kind),
        ("weights", version.weights or ""),
        ("folder", version.path),
        ("problem", version.problem() or ""),
        ("digest", version.digest[:12]),
        ("run", f"{version.run} ({version.run_folder})" if version.run_folder else version.run or ""),
        ("step", "" if version.step is None else f"{version.step:,}"),
        ("tokens", "" if version.tokens is None else f"{version.tokens:,}"),
        ("data", version.data.get("digest", "")),
        ("trained on", version.data.get("past", "")),
        ("registered", version.time),
    ]
    blocks = [pairs([(name, value) for name, value in facts if value]), _sources(version), _scores(version)]
    if moves:
        lines = [(move.tag, _number(move.from_version), _number(move.to_version), move.time) for move in moves]
        blocks.append(f"tags of {version.name}, moved\n{table(('tag', 'from', 'to', 'time'), lines)}")
    return "\n\n".join(filter(None, blocks))


def tag_line(version: Version, tag: str, before: int | None, *, remove: bool) -> str:
    """Return the sentence of a moved tag; ``before``: the version that had it."""
    if remove:
        return f"{tag} is on no version of {version.name}"
    was = f" (was {version.name}/{before})" if before not in (None, version.number) else ""
    return f"{tag} is on {version.label}{was}: models:/{version.name}@{tag}"


def _mark(version: Version) -> str:
    if not os.path.isdir(version.path):
        return " (gone)"
    return f" (now {version.replaced_by})" if version.replaced_by else ""


def _sources(version: Version) -> str:
    sources = version.data.get("sources") or {}
    lines = [(name, source["digest"] or "-", source["path"]) for name, source in sources.items()]
    return table(("source", "digest", "tokens of"), lines) if lines else ""


def _scores(version: Version) -> str:
    lines = [
        (f"{suite}: {task}", str(score["metric"]).replace("_", " "), _value(score["value"]), f"{score['n'] or '-'}")
        for suite, tasks in version.scores.items()
        for task, score in tasks.items()
    ]
    return table(("score", "measure", "value", "n"), lines) if lines else ""


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _number(version: int | None) -> str:
    return "-" if version is None else str(version)


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")
