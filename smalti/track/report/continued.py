"""Continued pretraining: the change of held-out sets of old and new domain since before the first step.

Values that were not measured in the same way (another sequence length, number of tokens or folder since step 0) are
never compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smalti.base.errors import UserError
from smalti.track.report.read import RunRecord, get

HEAD = ("domain", "held-out set", "before", "after", "change", "bound", "verdict")
"""Column names of the rows of ``words``."""
_EVAL, _BITS = "metrics/eval/", "/bits_per_byte"


@dataclass(frozen=True)
class Change:
    """Bits per byte of a held-out set before the first step and later."""

    name: str
    before: float
    after: float
    allowed_frac: float | None = None
    """Fraction by which they may rise (``data.retain``); None: a set of the new domain."""

    @property
    def worse_frac(self) -> float:
        """Fraction by which they rose, negative where they fell; infinite where the later value is not finite."""
        return self.after / self.before - 1 if math.isfinite(self.after) else math.inf

    @property
    def bounds_passed(self) -> float:
        """0 up to the bound, 1 up to twice the bound, and so on."""
        if self.allowed_frac is None:
            return 0
        worse = self.worse_frac / self.allowed_frac
        return max(0, math.ceil(worse) - 1) if math.isfinite(worse) else math.inf

    @property
    def verdict(self) -> str:
        """Old domain: kept, or worse than its bound; new domain: learned, or not better."""
        if self.allowed_frac is not None:
            return "worse than its bound" if self.bounds_passed else "kept"
        return "learned" if self.worse_frac < 0 else "not better"


@dataclass(frozen=True)
class Continued:
    """All held-out sets of such a run, the old domain first."""

    init_from: str
    step: int
    """Where ``after`` was measured."""
    changes: tuple[Change, ...]
    unlike: str = ""
    """What differs in how the two values were measured; they are no comparison then."""

    def words(self) -> list[tuple[str, ...]]:
        """A row of ``HEAD`` for each set."""
        return [self._words(one) for one in self.changes]

    def title(self) -> str:
        """What the table is about, in a line."""
        unlike = f" Not to be compared: {self.unlike}." if self.unlike else ""
        return f"Held-out bits per byte of {self.init_from}, before and after {self.step:,} steps.{unlike}"

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``words`` is the row for people."""
        sets = [
            {
                "set": one.name,
                "before": one.before,
                "after": one.after if math.isfinite(one.after) else None,
                "allowed_frac": one.allowed_frac,
                "words": self._words(one),
            }
            for one in self.changes
        ]
        plain = {"init_from": self.init_from, "step": self.step, "unlike": self.unlike}
        return {"title": self.title(), **plain, "sets": sets}

    def _words(self, one: Change) -> tuple[str, ...]:
        domain, bound = ("new", "-") if one.allowed_frac is None else ("old", f"+{one.allowed_frac * 100:.3g} %")
        change, verdict = ("-", "not measured alike") if self.unlike else (percent(one.worse_frac), one.verdict)
        return domain, one.name, f"{one.before:.4f}", f"{one.after:.4f}", change, bound, verdict


def continued(run: RunRecord, *, step: int | None = None) -> Continued | None:
    """What changed up to ``step`` (absent: the last measurement); None for a run that began with weights of its own, or
    measured nothing before its first step."""
    source, first, last = run.config.get("init_from"), config_at(run, 0), config_at(run, step)
    retain = get(last, "data.retain") or {}
    changes, at = [], 0
    for name in run.sources(_EVAL, _BITS):
        values = {s: v for s, v in zip(*run.series(_EVAL + name + _BITS), strict=True) if step is None or s <= step}
        before = values.get(0.0, math.nan)
        if source is None or not before > 0:
            continue
        newest = max(values)
        at = max(at, int(newest))
        changes.append(Change(name, before, values[newest], retain.get(name)))
    changes.sort(key=lambda one: one.allowed_frac is None)
    unlike = unlikeness(first, last, [one.name for one in changes])
    return Continued(str(source), at, tuple(changes), unlike) if changes else None


def config_at(run: RunRecord, step: int | None) -> Mapping[str, Any]:
    """The config, as plain values, that the last measurement up to ``step`` was made under."""
    made = [
        event
        for event in run.events
        if event.get("event") == "eval"
        and isinstance(event.get("step"), int)
        and (step is None or event["step"] <= step)
    ]
    own = Path(run.folder) / f"logs/attempt-{made[-1].get('attempt') if made else 0}/config.yaml"
    found = yaml.safe_load(own.read_text(encoding="utf-8")) if own.is_file() else run.config
    return found if isinstance(found, dict) else {}


def unlikeness(before: Mapping[str, Any], after: Mapping[str, Any], names: list[str]) -> str:
    """What sets two measurements of these held-out sets apart: ``data.seq_len 256 -> 512``; empty: nothing does."""
    keys = ["data.seq_len", "train.eval_tokens", *(f"data.heldout.{name}" for name in names)]
    apart = [(key, get(before, key), get(after, key)) for key in keys]
    return ", ".join(f"{key} {one} -> {other}" for key, one, other in apart if one != other)


def require_alike(run: RunRecord, config: Mapping[str, Any], names: list[str]) -> None:
    """UserError where ``config`` would measure these held-out sets otherwise than before the run's first step."""
    unlike = unlikeness(config_at(run, 0), config, names)
    if unlike:
        raise UserError(
            f"data.retain compares with what was measured before the first step, and this would differ: {unlike}",
            allowed="held-out sets measured as they were then",
            hint="take the change back, or drop the comparison: data.retain={}",
        )


def percent(frac: float) -> str:
    """``+2.31 %``"""
    return f"{frac * 100:+.2f} %" if math.isfinite(frac) else "no number"
