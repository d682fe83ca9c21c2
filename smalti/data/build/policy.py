"""The policy: decides from its annotations whether a document is kept. The first reason counts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from smalti.config.build import BuildConfig
from smalti.data.build.annotate import CODE
from smalti.data.build.clean.language import UNDETERMINED
from smalti.data.prepare.curate.examine import EMPTY_RULE
from smalti.data.prepare.curate.rules.presets import PRESETS
from smalti.data.prepare.curate.rules.rule import Rule

LANGUAGE_RULE = "language"
PII_RULE = "pii"
QUALITY_RULE = "quality"
CONTAMINATION_RULE = "decontaminate"

RULES: dict[str, Rule] = {
    f"{preset.name}/{rule.name}": rule
    for preset in PRESETS.values()
    for rule in (*preset.rules, *preset.rules_after_edit)
}
"""Rules by name, as annotations name them."""


class Drop(NamedTuple):
    """Why a document is dropped."""

    rule: str
    reason: str
    score: float | None = None


@dataclass(frozen=True)
class Policy:
    """Decides by the limits of a recipe."""

    languages: frozenset[str]
    min_language_score: float
    pii: str
    min_quality: float

    @classmethod
    def of(cls, config: BuildConfig) -> "Policy":
        """Return the policy of a recipe."""
        return cls(frozenset(config.languages), float(config.min_language_score), config.pii, float(config.min_quality))

    def decide(self, row: dict[str, Any]) -> Drop | None:
        """Return why a row of ANNOTATED is dropped; None: it is kept."""
        if row["problem"] is not None:
            return Drop(row["kind"], row["problem"])
        if row["text"] is not None and not row["text"].strip():
            return Drop(EMPTY_RULE, "nothing is left of the text", 0.0)
        if row["blocked"] is not None:
            rule, _, what = row["blocked"].partition(" ")
            return Drop(rule, f"it is on a list: {what}")
        foreign = self._language(row["language"], row["language_score"])
        # Spam has no language that is recognised: that it is spam says more.
        if foreign is not None and row["language"] != UNDETERMINED:
            return foreign
        for entry in row["scores"]:
            rule = RULES[entry["rule"]]
            if not rule.passes(entry["score"]):
                return Drop(entry["rule"], rule.reason(entry["score"]), entry["score"])
        if foreign is not None:
            return foreign
        if row["quality"] is not None and row["quality"] < self.min_quality:
            reason = f"quality {row['quality']:.3g} is below {self.min_quality:g}"
            return Drop(QUALITY_RULE, reason, row["quality"])
        if self.pii == "drop" and row["pii"] is not None:
            n_spans = row["pii"].count("[") - 1
            return Drop(PII_RULE, f"it holds personal data or secrets: {n_spans}", float(n_spans))
        if row["evaluation"] is not None:
            return Drop(CONTAMINATION_RULE, f"shares 13 words or more with {row['evaluation']}", 1.0)
        return None

    def _language(self, language: str, score: float) -> Drop | None:
        if not self.languages or language == CODE:
            return None
        wanted = ", ".join(sorted(self.languages))
        if language not in self.languages:
            what = "its language is not recognised" if language == UNDETERMINED else f"its language is {language}"
            return Drop(LANGUAGE_RULE, f"{what}; wanted: {wanted}", score)
        if score < self.min_language_score:
            return Drop(
                LANGUAGE_RULE, f"confidence in {language}: {score:.3g} is below {self.min_language_score:g}", score
            )
        return None
