"""A rule is a measure with limits; a preset is an ordered list of rules, with an optional edit between them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smalti.data.prepare.curate.rules.measure import Text


@dataclass(frozen=True)
class Rule:
    """Keeps a document when ``low <= score <= high``."""

    name: str
    what: str
    """Description of the score, for the reason of a drop."""
    measure: Callable[[Text], float]
    low: float = -math.inf
    high: float = math.inf
    english: bool = False
    """Whether the score means something for English only."""

    def score(self, text: Text) -> float:
        """Measure ``text``."""
        return float(self.measure(text))

    def passes(self, score: float) -> bool:
        """Whether a document with this score is kept."""
        return self.low <= score <= self.high

    def reason(self, score: float) -> str:
        """Return why a document with this score is dropped: the measure, and the limit that it breaks."""
        side, limit = ("below", self.low) if score < self.low else ("above", self.high)
        return f"{self.what}: {score:.6g} is {side} {limit:g}"


@dataclass(frozen=True)
class Preset:
    """Rules with the thresholds and in the order of one source."""

    name: str
    source: str
    """Source of the thresholds."""
    rules: tuple[Rule, ...]
    edit: Callable[[str], str] | None = None
    """Removes lines from the text, after ``rules``."""
    rules_after_edit: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The text of a document after edits, and for a drop the first rule that it breaks."""

    text: str
    rule: str | None = None
    reason: str | None = None
    score: float | None = None


def judge(text: str, presets: Sequence[Preset]) -> Verdict:
    """Apply the presets in order; the first broken rule decides. ``rule`` is ``<preset>/<rule>``."""
    measured = Text(text)
    for preset in presets:
        broken = _first_broken(measured, preset, preset.rules)
        if broken is None and preset.edit is not None:
            measured = Text(preset.edit(measured.text))
            broken = _first_broken(measured, preset, preset.rules_after_edit)
        if broken is not None:
            return broken
    return Verdict(measured.text)


def measure(text: str, presets: Sequence[Preset]) -> tuple[str, list[tuple[Rule, str, float]]]:
    """Return the text after all edits, and each rule with its name (``<preset>/<rule>``) and score, broken or not."""
    scores: list[tuple[Rule, str, float]] = []
    measured = Text(text)
    for preset in presets:
        scores += [(rule, f"{preset.name}/{rule.name}", rule.score(measured)) for rule in preset.rules]
        if preset.edit is not None:
            measured = Text(preset.edit(measured.text))
            scores += [(rule, f"{preset.name}/{rule.name}", rule.score(measured)) for rule in preset.rules_after_edit]
    return measured.text, scores


def _first_broken(text: Text, preset: Preset, rules: Sequence[Rule]) -> Verdict | None:
    for rule in rules:
        score = rule.score(text)
        if not rule.passes(score):
            return Verdict(text.text, f"{preset.name}/{rule.name}", rule.reason(score), score)
    return None
