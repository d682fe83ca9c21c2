"""What became of the rows of tuning data."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from smalti.data.examples import Example

_LISTED = 20
_QUANTILES = {"median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass
class SplitCounts:
    """The examples of a split."""

    examples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens in a sequence -> number of sequences; a pair has two."""

    def add(self, example: Example) -> None:
        """Count an example."""
        self.examples += 1
        self.tokens += sum(len(ids) for ids, _ in example.sequences)
        self.loss_tokens += sum(sum(mask) for _, mask in example.sequences)
        self.lengths.update(len(ids) for ids, _ in example.sequences)

    def quantile(self, q: float) -> int:
        """Return the smallest length that a fraction ``q`` of the sequences does not exceed."""
        left = q * self.lengths.total()
        for length in sorted(self.lengths):
            left -= self.lengths[length]
            if left <= 0:
                return length
        return 0


@dataclass
class Dropped:
    """Examples that were dropped or changed for one reason, and where the first of them are."""

    n: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        """Count one."""
        self.n += 1
        if len(self.first) < _LISTED:
            self.first.append(where)


@dataclass
class ExamplesReport:
    """Counts of rows and examples, complete once all examples are read."""

    rows: int = 0
    unreadable: Dropped = field(default_factory=Dropped)
    """Rows that are wrong, or that the template rejects."""
    contaminated: Dropped = field(default_factory=Dropped)
    """Rows that hold an item of an evaluation."""
    near_duplicates: Dropped = field(default_factory=Dropped)
    """Training rows that are near a held-out or an earlier row."""
    truncated: Dropped = field(default_factory=Dropped)
    too_long: Dropped = field(default_factory=Dropped)
    duplicates: Dropped = field(default_factory=Dropped)
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    template: str = ""
    """Name or path of the chat template; empty if all rows are texts."""

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        values = asdict(self)
        for name, counts in self.splits.items():
            values["splits"][name]["lengths"] = {key: counts.quantile(q) for key, q in _QUANTILES.items()}
        return values

    def rows_of_table(self) -> list[tuple[str, str]]:
        """Return (name, count) lines."""
        lines = [("rows", f"{self.rows:,}"), *([("template", self.template)] if self.template else [])]
        for name in ("unreadable", "contaminated", "near_duplicates", "truncated", "too_long", "duplicates"):
            dropped: Dropped = getattr(self, name)
            if dropped.n:
                lines.append((name.replace("_", " "), f"{dropped.n:,}: {', '.join(dropped.first[:3])}"))
        for name, counts in self.splits.items():
            tokens = f"{counts.tokens:,} tokens, {counts.loss_tokens:,} of them in the loss"
            lines.append((name, f"{counts.examples:,} examples, {tokens}"))
            lengths = ", ".join(f"{key} {counts.quantile(q):,}" for key, q in _QUANTILES.items())
            lines.append((f"{name}, tokens each", lengths))
        return lines
