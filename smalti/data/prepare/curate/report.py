"""The report of a curation: documents and bytes read, kept and dropped, by source, split and rule.

Documents: in = kept + dropped. Bytes: in = kept + dropped + edited, where ``edited`` is what normalisation and edits
removed from kept documents; it is negative where composition made texts longer.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from smalti.base.units import format_bytes, format_frac, format_quantity
from smalti.data.documents.files import LINKED, NO_FILE
from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN
from smalti.data.documents.publish import read_record

FORMAT_KIND = "curate"
RECORD_NAME = "report.json"


@dataclass
class Count:
    """Number of documents, and their bytes in UTF-8."""

    documents: int = 0
    n_bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """Count one document."""
        self.documents += 1
        self.n_bytes += n_bytes


@dataclass
class Cut:
    """Long documents, and the parts that they were cut into."""

    documents: int = 0
    parts: int = 0


@dataclass
class SplitReport:
    """The counts of one split of one source."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    edited_bytes: int = 0
    drops: dict[str, Count] = field(default_factory=dict)
    """By rule; bytes before edits."""

    def keep(self, raw_bytes: int, n_bytes: int) -> None:
        """Count a kept document: ``raw_bytes`` were read and ``n_bytes`` are written."""
        self.read.add(raw_bytes)
        self.kept.add(n_bytes)
        self.edited_bytes += raw_bytes - n_bytes

    def drop(self, rule: str, raw_bytes: int) -> None:
        """Count a dropped document."""
        self.read.add(raw_bytes)
        self.drops.setdefault(rule, Count()).add(raw_bytes)

    @property
    def dropped(self) -> Count:
        """The sum over all rules."""
        counts = self.drops.values()
        return Count(sum(count.documents for count in counts), sum(count.n_bytes for count in counts))

    def check(self) -> None:
        """Assert that the counts add up."""
        assert self.read.documents == self.kept.documents + self.dropped.documents
        assert self.read.n_bytes == self.kept.n_bytes + self.dropped.n_bytes + self.edited_bytes


@dataclass
class Report:
    """The counts of all sources."""

    sources: dict[str, dict[str, SplitReport]] = field(default_factory=dict)
    """Source -> split -> counts."""
    skipped_files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Source -> suffix -> number of files of unknown kind."""
    repeated_ids: dict[str, int] = field(default_factory=dict)
    """Source -> number of documents whose id is not unique in it; their drops cannot be distinguished by id."""
    cut: dict[str, Cut] = field(default_factory=dict)
    """Sources with documents longer than ``max_document_bytes``."""
    unknown_listed: int = 0
    """Number of documents in ``drop_documents`` that no source has."""
    heldout_frac: float = 0.0
    by_group: bool = False
    """Whether the config has a ``group_field``."""

    def of(self, source: str, split: str) -> SplitReport:
        """Return the counts of a split, which are created on first use."""
        return self.sources.setdefault(source, {name: SplitReport() for name in SPLITS})[split]

    @property
    def kept_documents(self) -> int:
        """Kept documents of all sources and splits."""
        return sum(split.kept.documents for splits in self.sources.values() for split in splits.values())

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in a fixed order."""
        return {
            "sources": {
                source: {split: _as_json(splits[split]) for split in SPLITS} for source, splits in self.sources.items()
            },
            "skipped_files": self.skipped_files,
            "repeated_ids": self.repeated_ids,
            "cut": {source: {"documents": cut.documents, "parts": cut.parts} for source, cut in self.cut.items()},
        }

    def rows(self) -> list[list[str]]:
        """Return table rows, one for each source and split."""
        return [
            [
                source,
                name,
                f"{split.read.documents:,}",
                format_bytes(split.read.n_bytes),
                f"{split.kept.documents:,}",
                format_bytes(split.kept.n_bytes),
                f"{split.dropped.documents:,}",
                format_frac(split.dropped.n_bytes / split.read.n_bytes if split.read.n_bytes else 0.0),
            ]
            for source, splits in self.sources.items()
            for name, split in splits.items()
        ]

    def drop_rows(self) -> list[list[str]]:
        """Return table rows of the drops, one for each source, split and rule."""
        return [
            [source, name, rule, f"{count.documents:,}", format_bytes(count.n_bytes)]
            for source, splits in self.sources.items()
            for name, split in splits.items()
            for rule, count in sorted(split.drops.items())
        ]

    def notes(self) -> list[str]:
        """Return lines about skipped files, cut documents, empty sources and repeated ids."""
        notes = [
            f"{source}: skipped {count:,} {suffix}"
            if suffix in (LINKED, NO_FILE)
            else f"{source}: skipped {format_quantity(count, 'file')} '{suffix}': unknown kind"
            for source, suffixes in self.skipped_files.items()
            for suffix, count in suffixes.items()
        ]
        notes += [note for source, splits in self.sources.items() if (note := _nothing_left(source, splits))]
        notes += [
            f"{source}: cut {format_quantity(cut.documents, 'document')} longer than max_document_bytes into "
            f"{cut.parts:,} parts (ID#1, ID#2 ...)"
            for source, cut in self.cut.items()
        ]
        for source, splits in self.sources.items():
            note = _none_held_out(source, splits, self.heldout_frac, by_group=self.by_group)
            notes += [note] if note else []
        if self.unknown_listed:
            listed = format_quantity(self.unknown_listed, "document")
            notes.append(f"{listed} in drop_documents: not in the sources, or with another id")
        return notes + [
            f"{source}: {format_quantity(count, 'document')} without a unique id; set id_field to a unique field"
            for source, count in self.repeated_ids.items()
        ]


COLUMNS = ("source", "split", "documents in", "bytes in", "kept", "bytes kept", "dropped", "bytes dropped")
DROP_COLUMNS = ("source", "split", "rule", "documents", "bytes")


def as_markdown(report: Report) -> str:
    """Return the text of ``report.md``: two tables and the notes."""
    parts = ["# Curation report", "", *markdown_table(COLUMNS, report.rows()), ""]
    drops = report.drop_rows()
    if drops:
        parts += ["## Drops by rule", "", *markdown_table(DROP_COLUMNS, drops), ""]
        parts += ["Each dropped document is listed with reason and score in `drops/<source>.parquet`.", ""]
    notes = report.notes()
    if notes:
        parts += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(parts)


def _nothing_left(source: str, splits: dict[str, SplitReport]) -> str | None:
    """Return a note for a source without training documents, with the rule that dropped most; None for others."""
    if splits[TRAIN].kept.documents:
        return None
    if not any(split.read.documents for split in splits.values()):
        return f"{source}: its files hold no documents"
    dropped: dict[str, int] = {}
    for split in splits.values():
        for rule, count in split.drops.items():
            dropped[rule] = dropped.get(rule, 0) + count.documents
    n_read = sum(split.read.documents for split in splits.values())
    n_kept = sum(split.kept.documents for split in splits.values())
    note = f"{source}: no document of {n_read:,} is left" + (" for training" if n_kept else "")
    if not dropped:
        return note
    rule = max(sorted(dropped), key=dropped.__getitem__)
    return f"{note}; '{rule}' dropped most: {dropped[rule]:,}"


_ENOUGH_HELDOUT = 3
"""Expected number of held-out documents under what a note proposes: then there is none once in twenty times."""


def _none_held_out(source: str, splits: dict[str, SplitReport], frac: float, *, by_group: bool) -> str | None:
    """Return a note for a source without kept held-out documents, with a hint; None for others."""
    train = splits[TRAIN]
    heldout = splits[HELDOUT]
    if not frac or not train.kept.documents or heldout.kept.documents:
        return None
    n = train.read.documents
    larger_frac = math.ceil(100 * max(2 * frac, _ENOUGH_HELDOUT / n)) / 100
    part_bytes = int(train.read.n_bytes * frac / _ENOUGH_HELDOUT)
    part_bytes -= part_bytes % 10 ** (len(str(part_bytes)) - 1)
    if heldout.read.documents:
        why = f"every held-out document was dropped ({heldout.read.documents:,})"
    else:
        why = f"no document of {n:,} is held out, at heldout_frac={frac:g}"
    if larger_frac < 0.5:
        advice = f"heldout_frac={larger_frac:g} holds more out"
    elif part_bytes >= 1000 and not by_group:
        advice = f"max_document_bytes={part_bytes} cuts long documents into parts, which are held out one by one"
    else:
        advice = "give it more documents"
    return f"{source}: {why}: a recipe cannot name it under data.heldout; {advice}"


def markdown_table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [list(header), ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _as_json(split: SplitReport) -> dict[str, Any]:
    dropped = split.dropped
    return {
        "documents": {"in": split.read.documents, "kept": split.kept.documents, "dropped": dropped.documents},
        "bytes": {
            "in": split.read.n_bytes,
            "kept": split.kept.n_bytes,
            "dropped": dropped.n_bytes,
            "edited": split.edited_bytes,
        },
        "drops": {
            rule: {"documents": count.documents, "bytes": count.n_bytes} for rule, count in sorted(split.drops.items())
        },
    }


def read_report(folder: str) -> dict[str, Any]:
    """Return the record of a finished curation or deduplication in ``folder``.

    Raises DataError if there is none, or its writer was interrupted.
    """
    return read_record(folder, kind=FORMAT_KIND, record_name=RECORD_NAME, verb="smalti data curate")
