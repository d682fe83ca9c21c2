"""The account of a deduplication: what a curation reports, and beside it the near-duplicates, alarms and the self-test.

Promises: it adds up (in = kept + dropped for every split), and equal inputs and config give equal reports.
"""

from dataclasses import dataclass, field
from typing import Any

from smalti.base.units import format_bytes, format_frac
from smalti.data.documents.heldout import HELDOUT, TRAIN
from smalti.data.prepare.curate.report import Count, Report
from smalti.data.prepare.dedup.decide import EXACT, EXACT_HELDOUT, NEAR, NEAR_HELDOUT
from smalti.data.prepare.dedup.selftest import SelftestReport

COLUMNS = ("source", "documents", "same words", "near", "near held-out", "removed", "held-out", "text left", "alarm")


@dataclass
class DedupReport:
    """All sources."""

    accounts: Report
    """Documents and bytes by source, split and rule, as a curation reports them."""
    selftest: SelftestReport
    alarm_frac: float
    n_candidates: int = 0
    """Pairs that MinHash proposed and that were compared exactly."""
    n_near: int = 0
    """Of these, how many are near."""
    histogram: list[int] = field(default_factory=list)
    """Candidates by Jaccard similarity: 20 bins from 0 to 1."""

    @property
    def alarms(self) -> dict[str, float]:
        """Sources that lost more of their training documents than is usual, with the share removed."""
        shares = {source: _share(splits[TRAIN].read, splits[TRAIN].dropped) for source, splits in self._sources()}
        return {source: share for source, share in shares.items() if share > self.alarm_frac}

    @property
    def near_heldout_documents(self) -> int:
        """Training documents that went because they are near to a held-out one, or have its words."""
        return sum(self._dropped(source, NEAR_HELDOUT, EXACT_HELDOUT) for source, _ in self._sources())

    @property
    def dropped_documents(self) -> int:
        """Over all sources."""
        return sum(splits[TRAIN].dropped.documents for _, splits in self._sources())

    def rows(self) -> list[list[str]]:
        """The table for people: one row a source; documents are those for training."""
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
        """Recall and precision on what was planted."""
        test = self.selftest
        if not sum(test.planted.values()):
            return f"self-test: {test.note}"
        recall = "recall NOT TESTED" if test.recall is None else f"recall {test.recall:.4f}"
        return (
            f"self-test: {recall} ({test.found} of {test.expected} copies and 5 % edits found), "
            f"precision {test.precision:.4f} ({test.wrong} of {test.planted['unrelated']} unrelated taken for near)"
        )

    def alarm_lines(self) -> list[str]:
        """A line for each alarm."""
        return [
            f"{source} lost {format_frac(share)} of its training documents (alarm_frac={self.alarm_frac}): "
            f"look into drops/{source}.parquet before you train on the rest"
            for source, share in self.alarms.items()
        ]

    def notes(self) -> list[str]:
        """What else the reader should know, beside the alarms."""
        lines = [self.selftest.note] if self.selftest.note and self.selftest.expected else []
        return lines + [
            f"{source}: no training document is left" for source, splits in self._sources()
            if not splits[TRAIN].kept.documents
        ]  # fmt: skip

    def histogram_text(self) -> str:
        """How similar the candidates are, a line for each bin that has any."""
        top = max(self.histogram, default=0)
        lines = []
        for number, count in enumerate(self.histogram):
            if count:
                bar = "#" * max(1, round(40 * count / top))
                lines.append(f"  {number / 20:.2f} - {(number + 1) / 20:.2f}  {count:>11,}  {bar}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values, in a fixed order: a curation's report and the section ``dedup``."""
        return self.accounts.as_json() | {
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
        return self.accounts.sources.items()

    def _dropped(self, source: str, *rules: str) -> int:
        drops = self.accounts.sources[source][TRAIN].drops
        return sum(drops[rule].documents for rule in rules if rule in drops)


def account(report: Report, source: str, counts: dict[str, Any]) -> None:
    """Put what ``output.write_source`` counted into ``report``, and hold that it adds up."""
    for split, found in counts.items():
        entry = report.of(source, split)
        drops = {rule: Count(*count) for rule, count in sorted(found["drops"].items())}
        entry.read, entry.drops = Count(*found["read"]), drops
        entry.kept = Count(*found["kept"])
        entry.check()


def as_markdown(report: DedupReport) -> str:
    """``report.md``."""
    parts = ["# Deduplication report", ""]
    parts += [f"**ALARM**: {line}\n" for line in report.alarm_lines()]
    head = [list(COLUMNS), ["---"] * len(COLUMNS), *report.rows()]
    parts += [f"| {' | '.join(line)} |" for line in head]
    parts += ["", report.selftest_line(), "", "## Similarity of the pairs that were compared", ""]
    parts += [f"{report.n_candidates:,} candidates, {report.n_near:,} near.", ""]
    parts += ["```", report.histogram_text(), "```", ""] if report.n_candidates else []
    parts += ["Each dropped document is listed with its partner and the similarity in `drops/<source>.parquet`.", ""]
    notes = report.notes()
    parts += ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []
    return "\n".join(parts)


def _share(read: Count, dropped: Count) -> float:
    return dropped.documents / read.documents if read.documents else 0.0
