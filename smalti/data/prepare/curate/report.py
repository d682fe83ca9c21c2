"""The account of a curation: documents and bytes in, kept and dropped, by source, split and rule. It always adds up.

in = kept + dropped, for documents; in = kept + dropped + edited, for bytes (``edited``: taken away by normalisation and
edits from documents that were kept; negative where composition made a text longer).
"""

import math
from dataclasses import dataclass, field
from typing import Any

from smalti.base.units import format_bytes, format_frac
from smalti.data.documents.files import LINKED, NO_FILE
from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN

FORMAT_KIND = "curate"
RECORD_NAME = "report.json"


@dataclass
class Count:
    """Documents, and bytes of UTF-8."""

    documents: int = 0
    n_bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """One more document."""
        self.documents += 1
        self.n_bytes += n_bytes


@dataclass
class Cut:
    """Long documents, and the parts they were cut into."""

    documents: int = 0
    parts: int = 0


@dataclass
class SplitReport:
    """What became of one split of one source."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    edited_bytes: int = 0
    drops: dict[str, Count] = field(default_factory=dict)
    """By rule; bytes as they were read."""

    def keep(self, raw_bytes: int, n_bytes: int) -> None:
        """A document of ``raw_bytes`` stays with ``n_bytes``."""
        self.read.add(raw_bytes)
        self.kept.add(n_bytes)
        self.edited_bytes += raw_bytes - n_bytes

    def drop(self, rule: str, raw_bytes: int) -> None:
        """A document goes."""
        self.read.add(raw_bytes)
        self.drops.setdefault(rule, Count()).add(raw_bytes)

    @property
    def dropped(self) -> Count:
        """All drops together."""
        counts = self.drops.values()
        return Count(sum(count.documents for count in counts), sum(count.n_bytes for count in counts))

    def check(self) -> None:
        """Nothing got lost between reading and writing."""
        assert self.read.documents == self.kept.documents + self.dropped.documents
        assert self.read.n_bytes == self.kept.n_bytes + self.dropped.n_bytes + self.edited_bytes


@dataclass
class Report:
    """All sources. ``skipped_files`` counts files of unknown kinds in the sources' folders by suffix."""

    sources: dict[str, dict[str, SplitReport]] = field(default_factory=dict)
    skipped_files: dict[str, dict[str, int]] = field(default_factory=dict)
    repeated_ids: dict[str, int] = field(default_factory=dict)
    """Documents, by source, whose id another one of the source has: their drops cannot be told apart by id."""

    cut: dict[str, Cut] = field(default_factory=dict)
    """By source, where a document was longer than ``max_document_bytes``."""
    heldout_frac: float = 0.0
    by_group: bool = False
    """A ``group_field`` is given."""

    def of(self, source: str, split: str) -> SplitReport:
        """The account of a split; begun when it is first asked for."""
        return self.sources.setdefault(source, {name: SplitReport() for name in SPLITS})[split]

    @property
    def kept_documents(self) -> int:
        """Documents that stay, over everything."""
        return sum(split.kept.documents for splits in self.sources.values() for split in splits.values())

    def as_json(self) -> dict[str, Any]:
        """Plain values, in a fixed order."""
        return {
            "sources": {
                source: {split: _as_json(splits[split]) for split in SPLITS} for source, splits in self.sources.items()
            },
            "skipped_files": self.skipped_files,
            "repeated_ids": self.repeated_ids,
            "cut": {source: {"documents": cut.documents, "parts": cut.parts} for source, cut in self.cut.items()},
        }

    def rows(self) -> list[list[str]]:
        """The table for people: one row a source and split."""
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
        """The drops for people: one row a source, split and rule."""
        return [
            [source, name, rule, f"{count.documents:,}", format_bytes(count.n_bytes)]
            for source, splits in self.sources.items()
            for name, split in splits.items()
            for rule, count in sorted(split.drops.items())
        ]

    def notes(self) -> list[str]:
        """What else the reader should know."""
        notes = [
            f"{source}: {count} {suffix} were passed over"
            if suffix in (LINKED, NO_FILE)
            else f"{source}: {count} file(s) '{suffix}' were passed over, their kind is not known"
            for source, suffixes in self.skipped_files.items()
            for suffix, count in suffixes.items()
        ]
        notes += [note for source, splits in self.sources.items() if (note := _nothing_left(source, splits))]
        notes += [
            f"{source}: {cut.documents:,} document(s) longer than max_document_bytes were cut into {cut.parts:,} parts "
            "(ID#1, ID#2 ...)"
            for source, cut in self.cut.items()
        ]
        for source, splits in self.sources.items():
            without = _none_held_out(source, splits, self.heldout_frac, by_group=self.by_group)
            notes += [without] if without else []
        return notes + [
            f"{source}: {count} document(s) have an id that another one has too; set id_field to a field that is unique"
            for source, count in self.repeated_ids.items()
        ]


COLUMNS = ("source", "split", "documents in", "bytes in", "kept", "bytes kept", "dropped", "bytes dropped")
DROP_COLUMNS = ("source", "split", "rule", "documents", "bytes")


def as_markdown(report: Report) -> str:
    """``report.md``: the two tables and the notes."""
    parts = ["# Curation report", "", *_table(COLUMNS, report.rows()), ""]
    drops = report.drop_rows()
    if drops:
        parts += ["## Drops by rule", "", *_table(DROP_COLUMNS, drops), ""]
        parts += ["Each dropped document is listed with reason and score in `drops/<source>.parquet`.", ""]
    notes = report.notes()
    if notes:
        parts += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(parts)


def _nothing_left(source: str, splits: dict[str, SplitReport]) -> str | None:
    """A line about a source of which nothing is left to train on, with the rule that took most; None for the others."""
    if splits[TRAIN].kept.documents:
        return None
    if not any(split.read.documents for split in splits.values()):
        return f"{source}: its files hold no documents"
    taken: dict[str, int] = {}
    for split in splits.values():
        for rule, count in split.drops.items():
            taken[rule] = taken.get(rule, 0) + count.documents
    total, left = sum(split.read.documents for split in splits.values()), sum(s.kept.documents for s in splits.values())
    what = f"{source}: of {total:,} document(s) none is left" + (" for training" if left else "")
    if not taken:
        return what
    most = max(sorted(taken), key=taken.__getitem__)
    return f"{what}; '{most}' dropped most: {taken[most]:,}"


_ENOUGH_HELDOUT = 3
"""Held-out documents to expect of what a note proposes: then none comes once in twenty times."""


def _none_held_out(source: str, splits: dict[str, SplitReport], frac: float, *, by_group: bool) -> str | None:
    """A line about a source without a held-out document that was kept, and what gives it some; None for the others."""
    train, heldout = splits[TRAIN], splits[HELDOUT]
    if not frac or not train.kept.documents or heldout.kept.documents:
        return None
    n = train.read.documents
    larger_frac = math.ceil(100 * max(2 * frac, _ENOUGH_HELDOUT / n)) / 100
    part_bytes = int(train.read.n_bytes * frac / _ENOUGH_HELDOUT)
    part_bytes -= part_bytes % 10 ** (len(str(part_bytes)) - 1)
    if heldout.read.documents:
        why = f"all {heldout.read.documents:,} held-out document(s) were dropped"
    else:
        why = f"of {n:,} document(s) none is held out, at heldout_frac={frac:g}"
    if larger_frac < 0.5:
        do = f"heldout_frac={larger_frac:g} holds more out"
    elif part_bytes >= 1000 and not by_group:
        do = f"max_document_bytes={part_bytes} cuts long documents into parts, which are held out one by one"
    else:
        do = "give it more documents"
    return f"{source}: {why}: a recipe cannot name it under data.heldout; {do}"


def _table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
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
