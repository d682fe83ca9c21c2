"""How far two measured numbers are apart, and whether that is more than their noise.

Guarantees: nothing is called a difference that a 95 % interval of it does not leave 0 out of; what is compared pair by
pair says so. Does not know the noise between seeds, which is often the larger one: only runs that differ in nothing but
the seed can show it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smalti.track.report.words import interval

_Z = 1.959964
_BATCHES = 10
_T = 2.262157
"""Student's t for 95 % and the 9 degrees of freedom of ten batch means."""
_CLEAR = 3
_LEAST = 2 * _BATCHES
"""Places that say something new, below which batch means do not keep their 5 % (docs/log.md)."""


@dataclass(frozen=True)
class Difference:
    """``after - before`` with the half width of its 95 % interval; None where the noise is unknown."""

    before: float | None
    after: float | None
    half_width: float | None = None
    how: str = ""
    """What the noise was told from: ``200 questions, paired``."""
    why_not: str = ""
    """Why there is no verdict, where more of the same would give one."""

    @property
    def value(self) -> float | None:
        """The difference; None where a side is missing."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def verdict(self) -> str:
        """``equal``, ``inside the noise``, ``lower``, ``higher``; ``why_not`` where the noise is unknown."""
        value = self.value
        if value is None:
            return ""
        if value == 0:
            return "equal"
        if self.half_width is None:
            return self.why_not
        return "inside the noise" if abs(value) <= self.half_width else "lower" if value < 0 else "higher"

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields, the difference and the verdict."""
        return {**asdict(self), "difference": self.value, "verdict": self.verdict or None}


def of_curves(before: Sequence[float], after: Sequence[float], *, what: str) -> Difference:
    """Means of two curves at the same places, by their differences place by place.

    Neighbouring steps are alike, so the error comes from the means of ten batches of places (batch means; Law and
    Carson 1979). While curves move apart or together, fewer than twenty places say something new, and that error is
    that of the trend. Then a difference is one where it is more than three times the noise of a single place, which
    stays less than that between two seeds (docs/log.md); for a smaller one the noise stays unknown.
    """
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return Difference(None, None)
    sides = [list(side) for side in zip(*pairs, strict=True)]
    means = [sum(side) / len(pairs) for side in sides]
    apart = [b - a for a, b in pairs]
    unknown = Difference(means[0], means[1], how=f"{len(pairs)} {what}", why_not=f"too few {what} to tell")
    if len(apart) < _LEAST:
        return unknown
    if _independent(apart) >= _LEAST:
        half = _T * _standard_error(_batch_means(apart, _BATCHES))
        return Difference(means[0], means[1], half, f"{len(pairs)} {what}, paired")
    bound = _CLEAR * math.hypot(*map(_noise, sides))
    if abs(means[1] - means[0]) <= bound:
        return unknown
    return Difference(means[0], means[1], bound, f"{len(pairs)} {what}, against {_CLEAR} times the noise of one")


def _batch_means(values: Sequence[float], batches: int) -> list[float]:
    edges = [round(k * len(values) / batches) for k in range(batches + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]


def _noise(curve: Sequence[float]) -> float:
    """Standard deviation of a value about the trend of a curve, from its second differences, which no slope enters.

    From the values, or from means of two where that gives more: then neighbours are alike.
    """
    found = []
    for size in (1, 2):
        values = _batch_means(curve, len(curve) // size)
        bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        found.append(math.sqrt(size * sum(bend**2 for bend in bends) / len(bends) / 6))
    return max(found)


def _independent(values: Sequence[float]) -> float:
    """How many of the values say something new: n (1 - r) / (1 + r), with r how alike neighbours are.

    r is the first autocorrelation, less what it is too small by in a short series (Marriott and Pope 1954).
    """
    n = len(values)
    mean = sum(values) / n
    away = [value - mean for value in values]
    square = sum(one * one for one in away)
    if square == 0:
        return n
    alike = sum(a * b for a, b in itertools.pairwise(away)) / square
    alike = min(max(alike + (1 + 3 * max(alike, 0)) / n, 0.0), 1.0)
    return n * (1 - alike) / (1 + alike)


def of_scores(
    before: Mapping[str, Any], after: Mapping[str, Any], samples: tuple[Sequence[Mapping[str, Any]], ...]
) -> Difference:
    """Two scores of one task: paired by question where both kept the same ones, else by their two intervals."""
    values = (_number(before.get("value")), _number(after.get("value")))
    if _windows(before) != _windows(after):
        return Difference(*values, why_not="the windows differ: no verdict")
    pairs = _same_questions(*samples)
    if len(pairs) >= 2 and all("nats" in a and "n_bytes" in a for a, _ in pairs):
        return _bits(values, pairs)
    if len(pairs) >= 2 and all(isinstance(a.get("correct"), bool) for a, _ in pairs):
        apart = [float(b["correct"]) - float(a["correct"]) for a, b in pairs]
        return Difference(*values, _Z * _standard_error(apart), f"{len(pairs)} questions, paired")
    ends = [interval(score) for score in (before, after)]
    if ends[0] is None or ends[1] is None:
        return Difference(*values)
    halves = (max(high - low, 0.0) / 2 for low, high in (ends[0], ends[1]))
    return Difference(*values, math.hypot(*halves), "from both intervals, not paired")


def _bits(values: tuple[float | None, float | None], pairs: list[tuple[Any, Any]]) -> Difference:
    """Bits per byte: a ratio of sums over documents, its error by the linearised ratio (Cochran 1977, 2.11)."""
    apart = [(b["nats"] - a["nats"]) / math.log(2) for a, b in pairs]
    sizes = [a["n_bytes"] for a, _ in pairs]
    ratio, n = sum(apart) / sum(sizes), len(pairs)
    rest = [one - ratio * size for one, size in zip(apart, sizes, strict=True)]
    half = _Z * math.sqrt(n / (n - 1) * sum(one * one for one in rest)) / sum(sizes)
    return Difference(*values, half, f"{n} documents, paired")


def _same_questions(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pairs of answers, where both sides were asked exactly the same; else none."""
    sides = [{_question(sample): sample for sample in side} for side in (before, after)]
    if not sides[0] or sides[0].keys() != sides[1].keys():
        return []
    return [(sides[0][key], sides[1][key]) for key in sides[0]]


def _question(sample: Mapping[str, Any]) -> str:
    """What was asked; a document by its place, its size and how it begins."""
    return repr([sample.get(key) for key in ("index", "prompt", "candidates", "gold", "n_bytes", "beginning")])


def _windows(score: Mapping[str, Any]) -> tuple[Any, Any]:
    """How long held-out documents were read, which moves bits per byte; results that do not say it had half windows."""
    seq_len = score.get("seq_len")
    return seq_len, score.get("overlap_tokens", None if seq_len is None else seq_len - seq_len // 2)


def _standard_error(values: Sequence[float]) -> float:
    n = len(values)
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
