"""The report of a build: counts of each step, source and rule, and examples near the limits. Equal builds: equal bytes.

It has the fields of the report of a curation, so ``smalti data tokenize``, ``dedup`` and ``inspect`` read the output.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.units import format_bytes, format_frac, format_quantity
from smalti.config.build import BuildConfig
from smalti.data.documents.heldout import SPLITS
from smalti.data.documents.publish import read_record
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, markdown_table

COLUMNS = ("step", "documents in", "dropped", "of them", "kept")
DROP_COLUMNS = ("source", "rule", "documents", "bytes")
_STEP_OF = {
    "extract": "extract",
    "block": "block",
    "dedup": "deduplicate",
    "decontaminate": "decontaminate",
    "language": "language",
    "repeats": "repeats",
    "semantic": "semantic",
}
_STEPS = ("extract", "block", "language", "quality", "pii", "decontaminate", "deduplicate", "semantic", "repeats")


@dataclass(frozen=True)
class BuildReport:
    """The counts, as plain values, and whether anything was built."""

    values: dict[str, Any]
    is_new: bool = True
    """False: the output was up to date and nothing was done."""

    @classmethod
    def of(cls, config: BuildConfig, html: str, steps: Sequence[Path]) -> "BuildReport":
        """Join the records of steps, of which ``select`` is the first and each reads what the one before kept."""
        records: list[dict[str, Any]] = [store.read_json(step / RECORD_NAME) for step in steps]
        first = records[0]
        figures: dict[str, Any] = store.read_json(steps[0] / "figures.json")
        sources = {
            source: {
                split: reduce(_joined, [record["sources"][source][split] for record in records]) for split in SPLITS
            }
            for source in first["sources"]
        }
        values = {
            "name": config.name,
            "sources": sources,
            "skipped_files": first["skipped_files"],
            "repeated_ids": first["repeated_ids"],
            "cut": {},
            "build": {"html": html, **figures["counts"], "near_limits": figures["near_limits"]},
        }
        values["build"]["steps"] = _steps(sources)
        for record in records:
            values |= {name: record[name] for name in ("dedup", "semantic", "repeats") if name in record}
        return cls(values)

    @classmethod
    def up_to_date(cls, output: str, digest: str) -> "BuildReport | None":
        """Return the report of ``output`` if it was built from the same inputs and recipe and is complete."""
        path = Path(output) / RECORD_NAME
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_bytes())
            files = record["files"]
        except (ValueError, TypeError, KeyError):
            return None
        if record.get("build_digest") != digest or not record.get("complete"):
            return None
        if not all(os.path.isfile(os.path.join(output, name)) for name in [*files, "report.md"]):
            return None
        return cls(record, is_new=False)

    def rows(self) -> list[list[str]]:
        """Return table rows, one for each step."""
        return [
            [
                step["step"],
                f"{step['in']:,}",
                f"{step['dropped']:,}",
                ", ".join(f"{rule} {count:,}" for rule, count in step["rules"].items()),
                f"{step['in'] - step['dropped']:,}",
            ]
            for step in self.values["build"]["steps"]
        ]

    def drop_rows(self) -> list[list[str]]:
        """Return table rows of the drops, one for each source and rule."""
        return [
            [source, rule, f"{count['documents']:,}", format_bytes(count["bytes"])]
            for source, splits in self.values["sources"].items()
            for rule, count in sorted(_merged([split["drops"] for split in splits.values()]).items())
        ]

    def notes(self) -> list[str]:
        """Return lines about personal data, encodings, skipped files, alarms and the self-test."""
        values = self.values
        built = values["build"]
        notes = [f"HTML: {built['html']}"] if built["kinds"].get("html") else []
        if built["pii"]:
            counts = ", ".join(f"{kind} {count:,}" for kind, count in built["pii"].items())
            notes.append(f"personal data in {format_quantity(built['pii_documents'], 'kept document')}: {counts}")
        if built["encodings"]:
            counts = ", ".join(f"{name} {count:,}" for name, count in built["encodings"].items())
            notes.append(f"files that are not UTF-8: {counts}")
        if built["cut_parts"]:
            notes.append(f"long documents were cut into {format_quantity(built['cut_parts'], 'part')} (ID#1, ID#2 ...)")
        if values.get("semantic"):
            semantic = values["semantic"]
            limit = "none" if semantic["threshold"] is None else f"{semantic['threshold']:.3f}"
            notes.append(f"similar documents: dropped from cosine {limit} on, in {semantic['clusters']:,} clusters")
        if values.get("repeats"):
            repeats = values["repeats"]
            notes.append(
                f"repeated {repeats['unit']} of {repeats['min_words']} words or more: {repeats['words']:,} words cut "
                f"out of {format_quantity(repeats['documents'], 'document')}"
            )
        for source, suffixes in values["skipped_files"].items():
            skipped = ", ".join(f"'{suffix}' {count:,}" for suffix, count in suffixes.items())
            notes.append(f"{source}: skipped, of no known kind: {skipped}")
        for source, count in values["repeated_ids"].items():
            notes.append(f"{source}: {format_quantity(count, 'document')} without a unique id; set id_field")
        for source, frac in values.get("dedup", {}).get("alarms", {}).items():
            notes.append(f"{source} lost {format_frac(frac)} as near-duplicates: look at drops/{source}.parquet")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Return plain values in a fixed order."""
        return self.values

    def as_markdown(self) -> str:
        """Return the text of ``report.md``."""
        built = self.values["build"]
        parts = [f"# {self.values['name']}", "", *markdown_table(COLUMNS, self.rows()), ""]
        drops = self.drop_rows()
        if drops:
            parts += ["## Drops by rule", "", *markdown_table(DROP_COLUMNS, drops), ""]
            parts += ["Each dropped document is listed with reason and score in `drops/<source>.parquet`.", ""]
        languages = [[name, f"{count:,}"] for name, count in built["languages"].items()]
        parts += ["## Languages", "", *markdown_table(("language", "documents read"), languages), ""]
        if built["near_limits"]:
            parts += ["## Examples near the limits", "", *_examples(built["near_limits"])]
        if self.values.get("semantic", {}).get("examples"):
            similar = [[f"{row['cosine']:.3f}", *(_cell(row[side][name]) for side in ("dropped", "kept")
                        for name in ("document", "text"))] for row in self.values["semantic"]["examples"]]  # fmt: skip
            head = ("cosine", "dropped", "text", "kept", "text")
            parts += ["## Similar documents", "", *markdown_table(head, similar), ""]
        if self.values.get("repeats", {}).get("examples"):
            cuts = [[_cell(f"{row['source']}/{row['id']}"), f"{row['words']:,}", _cell(row["text"])]
                    for row in self.values["repeats"]["examples"]]  # fmt: skip
            parts += ["## The longest cuts", "", *markdown_table(("document", "words", "text"), cuts), ""]
        notes = self.notes()
        return "\n".join([*parts, *(["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else [])])


def read_build(folder: str) -> dict[str, Any]:
    """Return the record of a finished build. DataError if there is none, or its writer was interrupted."""
    return read_record(folder, kind=FORMAT_KIND, record_name=RECORD_NAME, verb="smalti data build")


def step_of(rule: str) -> str:
    """Return the step to which a rule belongs."""
    return "pii" if rule == "pii" else _STEP_OF.get(rule.partition("/")[0], "quality")


def _steps(sources: dict[str, Any]) -> list[dict[str, Any]]:
    splits = [split for source in sources.values() for split in source.values()]
    left = sum(split["documents"]["in"] for split in splits)
    rules = {rule: count["documents"] for rule, count in sorted(_merged([split["drops"] for split in splits]).items())}
    steps = []
    for step in _STEPS:
        of_step = {rule: count for rule, count in rules.items() if step_of(rule) == step}
        steps.append({"step": step, "in": left, "dropped": sum(of_step.values()), "rules": of_step})
        left -= sum(of_step.values())
    return steps


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join the counts of a split: what ``first`` read, and what ``second`` kept of that."""
    drops = _merged([first["drops"], second["drops"]])
    n_bytes = {
        "in": first["bytes"]["in"],
        "kept": second["bytes"]["kept"],
        "dropped": sum(count["bytes"] for count in drops.values()),
        "edited": first["bytes"]["edited"] + second["bytes"]["edited"],
    }
    n_in, n_kept = first["documents"]["in"], second["documents"]["kept"]
    n_dropped = sum(count["documents"] for count in drops.values())
    assert n_in == n_kept + n_dropped, f"{n_in} documents, of which {n_kept} are kept and {n_dropped} dropped"
    return {"documents": {"in": n_in, "kept": n_kept, "dropped": n_dropped}, "bytes": n_bytes, "drops": drops}


def _merged(drops: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for by_rule in drops:
        for rule, count in by_rule.items():
            entry = merged.setdefault(rule, {"documents": 0, "bytes": 0})
            merged[rule] = {name: entry[name] + count[name] for name in entry}
    return dict(sorted(merged.items()))


def _examples(limits: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for rule, entry in limits.items():
        bounds = [f"{side} {entry[side]:g}" for side in ("low", "high") if entry[side] is not None]
        lines += [f"### {rule} ({', '.join(bounds)})", ""]
        rows = [
            [outcome, f"{example['score']:.4g}", _cell(f"{example['source']}/{example['id']}"), _cell(example["text"])]
            for outcome in ("dropped", "kept")
            for example in entry[outcome]
        ]
        lines += [*markdown_table(("", "score", "document", "text"), rows), ""]
    return lines


def _cell(text: str) -> str:
    """Escape what would end a cell, and what would be markup or a control sequence of a terminal."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
