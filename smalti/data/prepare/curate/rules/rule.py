"""A rule is a measure with limits; a preset is an ordered list of rules, perhaps with an edit between them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smalti.data.prepare.curate.rules.measure import Text


@dataclass(frozen=True)
class Rule:
    """Keeps a document when ``low <= score <= high``."""

    name: str
    what: str
    """The score in words, for the reason of a drop."""
    measure: Callable[[Text], float]
    low: float = -math.inf
    high: float = math.inf

    def score(self, text: Text) -> float:
        """The measured value."""
        return float(self.measure(text))

    def passes(self, score: float) -> bool:
        """Whether a document with this score stays."""
        return self.low <= score <= self.high

    def reason(self, score: float) -> str:
        """Why a document with this score goes: what was measured, and the limit it breaks."""
        side, limit = ("below", self.low) if score < self.low else ("above", self.high)
        return f"{self.what}: {score:.6g} is {side} {limit:g}"


@dataclass(frozen=True)
class Preset:
    """Rules with the thresholds of one source, in its order."""

    name: str
    source: str
    """Where the thresholds come from."""
    rules: tuple[Rule, ...]
    edit: Callable[[str], str] | None = None
    """Takes lines out of the text, after ``rules``."""
    rules_after_edit: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of a document: its text after edits, and for a drop the first rule that it breaks."""

    text: str
    rule: str | None = None
    reason: str | None = None
    score: float | None = None


def judge(text: str, presets: Sequence[Preset]) -> Verdict:
    """Run the presets in order; the first broken rule decides. ``rule`` is ``<preset>/<rule>``."""
    measured = Text(text)
    for preset in presets:
        broken = _first_broken(measured, preset, preset.rules)
        if broken is None and preset.edit is not None:
            measured = Text(preset.edit(measured.text))
            broken = _first_broken(measured, preset, preset.rules_after_edit)
        if broken is not None:
            return broken
    return Verdict(measured.text)


def _first_broken(text: Text, preset: Preset, rules: Sequence[Rule]) -> Verdict | None:
    for rule in rules:
        score = rule.score(text)
        if not rule.passes(score):
            return Verdict(text.text, f"{preset.name}/{rule.name}", rule.reason(score), score)
    return None
