"""Continued pretraining and tuning: the change of bits per byte of held-out sets of old and new domain since step 0.

Values that were measured differently (another sequence length, number of tokens or folder since step 0) are never
compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smalti.base.errors import UserError
from smalti.track.report.read import RunRecord, get

COLUMNS = ("domain", "held-out set", "before", "after", "change", "bound", "verdict")
"""Column names of the rows of ``Continued.table_rows``."""
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
    def times_bound_exceeded(self) -> float:
        """Number of multiples of the bound exceeded: 0 up to the bound, 1 up to twice the bound, and so on."""
        if self.allowed_frac is None:
            return 0
        worse = self.worse_frac / self.allowed_frac
        return max(0, math.ceil(worse) - 1) if math.isfinite(worse) else math.inf

    @property
    def verdict(self) -> str:
        """``kept`` or ``worse than its bound`` for the old domain, ``learned`` or ``not better`` for the new."""
        if self.allowed_frac is not None:
            return "worse than its bound" if self.times_bound_exceeded else "kept"
        return "learned" if self.worse_frac < 0 else "not better"


@dataclass(frozen=True)
class Continued:
    """The changes of all held-out sets of a continued run, those of the old domain first."""

    init_from: str
    step: int
    """The step of the ``after`` values."""
    changes: tuple[Change, ...]
    unlike: str = ""
    """How the two measurements differ in their settings; not comparable unless empty."""
    tunes: bool = False
    """The run tunes the model on examples."""

    @property
    def heading(self) -> str:
        """The heading of the section with the table."""
        return "Before and after tuning" if self.tunes else "Continued pretraining"

    def table_rows(self) -> list[tuple[str, ...]]:
        """Return a row of the columns ``COLUMNS`` for each set."""
        return [self._table_row(change) for change in self.changes]

    def title(self) -> str:
        """Return the title of the table, one line."""
        unlike = f" Not to be compared: {self.unlike}." if self.unlike else ""
        return f"Held-out bits per byte of {self.init_from}, before and after {self.step:,} steps.{unlike}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``words`` is the row of the table as text."""
        sets = [
            {
                "set": change.name,
                "before": change.before,
                "after": change.after if math.isfinite(change.after) else None,
                "allowed_frac": change.allowed_frac,
                "words": self._table_row(change),
            }
            for change in self.changes
        ]
        plain = {"init_from": self.init_from, "step": self.step, "unlike": self.unlike}
        return {"title": self.title(), **plain, "sets": sets}

    def _table_row(self, change: Change) -> tuple[str, ...]:
        domain = "new" if change.allowed_frac is None else "old"
        bound = "-" if change.allowed_frac is None else f"+{change.allowed_frac * 100:.3g} %"
        moved, verdict = ("-", "not measured alike") if self.unlike else (percent(change.worse_frac), change.verdict)
        return domain, change.name, f"{change.before:.4f}", f"{change.after:.4f}", moved, bound, verdict


def continued(run: RunRecord, *, step: int | None = None) -> Continued | None:
    """Return the changes up to ``step`` (default: the last measurement); None for a run without ``init_from``, or
    without a measurement before its first step."""
    source, first, last = run.config.get("init_from"), config_at(run, 0), config_at(run, step)
    retain = get(last, "data.retain") or {}
    changes = []
    at = 0
    for name in run.sources(_EVAL, _BITS):
        values = {s: v for s, v in zip(*run.series(_EVAL + name + _BITS), strict=True) if step is None or s <= step}
        before = values.get(0.0, math.nan)
        if source is None or not before > 0:
            continue
        newest = max(values)
        at = max(at, int(newest))
        changes.append(Change(name, before, values[newest], retain.get(name)))
    changes.sort(key=lambda change: change.allowed_frac is None)
    unlike = settings_difference(first, last, [change.name for change in changes])
    tunes = run.config.get("tune") is not None
    return Continued(str(source), at, tuple(changes), unlike, tunes) if changes else None


def config_at(run: RunRecord, step: int | None) -> Mapping[str, Any]:
    """Return the config, as plain values, of the last measurement up to ``step``."""
    evals = [
        event
        for event in run.events
        if event.get("event") == "eval"
        and isinstance(event.get("step"), int)
        and (step is None or event["step"] <= step)
    ]
    path = Path(run.folder) / f"logs/attempt-{evals[-1].get('attempt') if evals else 0}/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else run.config
    return config if isinstance(config, dict) else {}


def settings_difference(before: Mapping[str, Any], after: Mapping[str, Any], names: list[str]) -> str:
    """Return how two measurements of these held-out sets differ in settings: ``data.seq_len 256 -> 512``, or empty."""
    keys = ["data.seq_len", "train.eval_tokens", *(f"data.heldout.{name}" for name in names)]
    return ", ".join(
        f"{key} {get(before, key)} -> {get(after, key)}" for key in keys if get(before, key) != get(after, key)
    )


def require_same_settings(run: RunRecord, config: Mapping[str, Any], names: list[str]) -> None:
    """Raise UserError where ``config`` would measure these held-out sets differently from before the first step."""
    unlike = settings_difference(config_at(run, 0), config, names)
    if unlike:
        raise UserError(
            f"data.retain compares with the measurement before the first step, which had other settings: {unlike}",
            allowed="held-out sets measured as before the first step",
            hint="undo the change, or drop the comparison: data.retain={}",
        )


def percent(frac: float) -> str:
    """Return a fraction as text: ``+2.31 %``."""
    return f"{frac * 100:+.2f} %" if math.isfinite(frac) else "no number"
