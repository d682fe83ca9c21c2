"""The report of a deduplication: the report of a curation, with near-duplicates, alarms and the self-test.

In every split, in = kept + dropped. Equal inputs and config give equal reports.
"""

from dataclasses import dataclass, field
from typing import Any

from smalti.base.units import format_bytes, format_frac
from smalti.data.documents.heldout import HELDOUT, TRAIN
from smalti.data.prepare.curate.report import Count, Report, markdown_table
from smalti.data.prepare.dedup.decide import EXACT, EXACT_HELDOUT, NEAR, NEAR_HELDOUT
from smalti.data.prepare.dedup.selftest import SelftestReport

COLUMNS = ("source", "documents", "same words", "near", "near held-out", "removed", "held-out", "text left", "alarm")


@dataclass
class DedupReport:
    """The counts of all sources, the alarms and the self-test."""

    counts: Report
    """Documents and bytes by source, split and rule."""
    selftest: SelftestReport
    alarm_frac: float
    n_candidates: int = 0
    """Pairs that MinHash proposed; all were compared exactly."""
    n_near: int = 0
    """Candidates that are near."""
    histogram: list[int] = field(default_factory=list)
    """Candidates by Jaccard similarity, in 20 bins from 0 to 1."""

    @property
    def alarms(self) -> dict[str, float]:
        """Sources that lost more than ``alarm_frac`` of their training documents, with the share dropped."""
        shares = {source: _share(splits[TRAIN].read, splits[TRAIN].dropped) for source, splits in self._sources()}
        return {source: share for source, share in shares.items() if share > self.alarm_frac}

    @property
    def near_heldout_documents(self) -> int:
        """Training documents that were dropped because a held-out one is near, or has the same words."""
        return sum(self._dropped(source, NEAR_HELDOUT, EXACT_HELDOUT) for source, _ in self._sources())

    def rows(self) -> list[list[str]]:
        """Return table rows, one for each source; ``documents`` counts training documents."""
        return [
            [
                source,
                f"{splits[TRAIN].read.documents:,}",
                f"{self._dropped(source, EXACT):,}",
                f"{self._dropped(source, NEAR):,}",
                f"{self._dropped(source, NEAR_HELDOUT, EXACT_HELDOUT):,}",
                format_frac(_share(splits[TRAIN].read, splits[TRAIN].dropped)),
                f"{splits[HELDOUT].kept.documents:,}",
                format_bytes(splits[TRAIN].kept.n_bytes + splits[HELDOUT].kept.n_bytes),
                "ALARM" if source in self.alarms else "",
            ]
            for source, splits in self._sources()
        ]

    def selftest_line(self) -> str:
        """Return a line with recall and precision on the planted documents."""
        test = self.selftest
        if not sum(test.planted.values()):
            return f"self-test: {test.note}"
        recall = "recall NOT TESTED" if test.recall is None else f"recall {test.recall:.4f}"
        return (
            f"self-test: {recall} ({test.detected} of {test.expected} copies and 5 % edits found), "
            f"precision {test.precision:.4f} ({test.wrong} of {test.planted['unrelated']} unrelated called near)"
        )

    def alarm_lines(self) -> list[str]:
        """Return a line for each alarm."""
        return [
            f"{source} lost {format_frac(share)} of its training documents (alarm_frac={self.alarm_frac}): "
            f"check drops/{source}.parquet before you train on the rest"
            for source, share in self.alarms.items()
        ]

    def notes(self) -> list[str]:
        """Return lines about an incomplete self-test and sources without training documents."""
        lines = [self.selftest.note] if self.selftest.note and self.selftest.expected else []
        return lines + [
            f"{source}: no training document is left" for source, splits in self._sources()
            if not splits[TRAIN].kept.documents
        ]  # fmt: skip

    def histogram_text(self) -> str:
        """Return a text histogram, with a bar for each non-empty bin."""
        largest = max(self.histogram, default=0)
        lines = []
        for number, count in enumerate(self.histogram):
            if count:
                bar = "#" * max(1, round(40 * count / largest))
                lines.append(f"  {number / 20:.2f} - {(number + 1) / 20:.2f}  {count:>11,}  {bar}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in a fixed order: the report of a curation, and the section ``dedup``."""
        return self.counts.as_json() | {
            "dedup": {
                "alarms": self.alarms,
                "near_heldout_documents": self.near_heldout_documents,
                "candidate_pairs": self.n_candidates,
                "near_pairs": self.n_near,
                "jaccard_histogram": self.histogram,
                "selftest": self.selftest.as_json(),
            }
        }

    def _sources(self) -> Any:
        return self.counts.sources.items()

    def _dropped(self, source: str, *rules: str) -> int:
        drops = self.counts.sources[source][TRAIN].drops
        return sum(drops[rule].documents for rule in rules if rule in drops)


def add_counts(report: Report, source: str, splits: dict[str, Any]) -> None:
    """Add the counts of ``output.write_source`` to ``report``, and assert that they add up."""
    for split, counts in splits.items():
        entry = report.of(source, split)
        entry.read = Count(*counts["read"])
        entry.kept = Count(*counts["kept"])
        entry.drops = {rule: Count(*count) for rule, count in sorted(counts["drops"].items())}
        entry.check()


def as_markdown(report: DedupReport) -> str:
    """Return the text of ``report.md``."""
    parts = ["# Deduplication report", ""]
    parts += [f"**ALARM**: {line}\n" for line in report.alarm_lines()]
    parts += markdown_table(COLUMNS, report.rows())
    parts += ["", report.selftest_line(), "", "## Similarity of the compared pairs", ""]
    parts += [f"{report.n_candidates:,} candidates, {report.n_near:,} near.", ""]
    parts += ["```", report.histogram_text(), "```", ""] if report.n_candidates else []
    parts += ["Each dropped document is listed with its partner and the similarity in `drops/<source>.parquet`.", ""]
    notes = report.notes()
    parts += ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []
    return "\n".join(parts)


def _share(read: Count, dropped: Count) -> float:
    return dropped.documents / read.documents if read.documents else 0.0
