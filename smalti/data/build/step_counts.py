"""Counts of the steps of a build: documents by kind, encoding, language, and spans of personal data."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepCounts:
    """Counts over all documents that were read; ``pii`` over those that are kept by the policy."""

    kinds: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    cut_parts: int = 0
    pii: Counter[str] = field(default_factory=Counter)
    pii_documents: int = 0

    def add(self, row: dict[str, Any], rule: str | None) -> None:
        """Count a row of ANNOTATED; ``rule``: what drops it."""
        if row["problem"] is not None:
            return
        self.kinds[row["kind"]] += 1
        self.languages[row["language"]] += 1
        self.cut_parts += row["part"] is not None
        if row["encoding"] is not None:
            self.encodings[row["encoding"]] += 1
        if row["pii"] is not None and rule is None:
            self.pii_documents += 1
            self.pii.update(span[2] for span in json.loads(row["pii"]))

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in a fixed order."""
        return {
            "kinds": dict(sorted(self.kinds.items())),
            "encodings": dict(sorted(self.encodings.items())),
            "languages": dict(sorted(self.languages.items())),
            "cut_parts": self.cut_parts,
            "pii": dict(sorted(self.pii.items())),
            "pii_documents": self.pii_documents,
        }
