"""The difference of two measured numbers, with its 95 % interval and a verdict.

A number is called lower or higher only if the 95 % interval of the difference excludes 0. The noise between seeds,
which is often the larger one, is not included: only runs that differ in nothing but the seed can show it.
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
_MIN_POINTS = 2 * _BATCHES
"""Fewest independent points for batch means: with fewer their error rate exceeds 5 % (docs/log.md)."""


@dataclass(frozen=True)
class Difference:
    """``after - before`` with the half width of its 95 % interval; None where the noise is unknown."""

    before: float | None
    after: float | None
    half_width: float | None = None
    how: str = ""
    """The data that the interval was computed from: ``28 documents, paired``."""
    why_not: str = ""
    """Why there is no verdict, if more data or equal settings would give one."""

    @property
    def value(self) -> float | None:
        """The difference; None if either number is missing."""
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
        """Return a JSON object with the fields, the difference and the verdict."""
        return {**asdict(self), "difference": self.value, "verdict": self.verdict or None}


def of_curves(before: Sequence[float], after: Sequence[float], *, what: str) -> Difference:
    """Compare the means of two curves at the same points, by their pointwise differences.

    Neighbouring steps are correlated, so the standard error is that of the means of ten batches of points (batch means;
    Law and Carson 1979). While the curves converge or diverge, fewer than twenty points are independent, and that error
    would be the error of the trend. Then only a difference of more than three times the noise of a single point gets a
    verdict, a bound that is less than the noise between two seeds (docs/log.md); the noise of a smaller one is unknown.
    """
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return Difference(None, None)
    sides = [list(side) for side in zip(*pairs, strict=True)]
    means = [sum(side) / len(pairs) for side in sides]
    differences = [b - a for a, b in pairs]
    unknown = Difference(means[0], means[1], how=f"{len(pairs)} {what}", why_not=f"too few {what} to tell")
    if len(differences) < _MIN_POINTS:
        return unknown
    if _independent(differences) >= _MIN_POINTS:
        half = _T * _standard_error(_batch_means(differences, _BATCHES))
        return Difference(means[0], means[1], half, f"{len(pairs)} {what}, paired")
    bound = _CLEAR * math.hypot(*map(_noise, sides))
    if abs(means[1] - means[0]) <= bound:
        return unknown
    return Difference(means[0], means[1], bound, f"{len(pairs)} {what}, against {_CLEAR} times the noise of one")


def _batch_means(values: Sequence[float], batches: int) -> list[float]:
    edges = [round(k * len(values) / batches) for k in range(batches + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]


def _noise(curve: Sequence[float]) -> float:
    """Return the standard deviation of a value about the trend of a curve, from its second differences, which do not
    depend on the slope.

    It is that of the values, or of means of two where that is larger, as it is if neighbours are correlated.
    """
    deviations = []
    for size in (1, 2):
        values = _batch_means(curve, len(curve) // size)
        bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        deviations.append(math.sqrt(size * sum(bend**2 for bend in bends) / len(bends) / 6))
    return max(deviations)


def _independent(values: Sequence[float]) -> float:
    """Return the effective number of independent values: n (1 - r) / (1 + r).

    r is the first autocorrelation, corrected for its bias in a short series (Marriott and Pope 1954).
    """
    n = len(values)
    mean = sum(values) / n
    deviations = [value - mean for value in values]
    square = sum(deviation * deviation for deviation in deviations)
    if square == 0:
        return n
    r = sum(a * b for a, b in itertools.pairwise(deviations)) / square
    r = min(max(r + (1 + 3 * max(r, 0)) / n, 0.0), 1.0)
    return n * (1 - r) / (1 + r)


def of_scores(
    before: Mapping[str, Any], after: Mapping[str, Any], samples: tuple[Sequence[Mapping[str, Any]], ...]
) -> Difference:
    """Compare two scores of one task: bits per byte by document where both have the same ones, else by their intervals.

    Other scores have no verdict: ``smalti eval compare`` gives one, corrected for clusters and the number of tasks.
    """
    values = (_number(before.get("value")), _number(after.get("value")))
    if _windows(before) != _windows(after):
        return Difference(*values, why_not="the windows differ: no verdict")
    pairs = _same_questions(*samples)
    if len(pairs) >= 2 and all("nats" in a and "n_bytes" in a for a, _ in pairs):
        return _bits(values, pairs)
    if before.get("metric") != "bits_per_byte":
        return Difference(*values, why_not="no verdict here: smalti eval compare")
    ends = [interval(score) for score in (before, after)]
    if ends[0] is None or ends[1] is None:
        return Difference(*values)
    halves = (max(high - low, 0.0) / 2 for low, high in (ends[0], ends[1]))
    return Difference(*values, math.hypot(*halves), "from both intervals, not paired")


def _bits(values: tuple[float | None, float | None], pairs: list[tuple[Any, Any]]) -> Difference:
    """Compare bits per byte, a ratio of sums over documents; its error is that of the linearised ratio (Cochran 1977,
    2.11)."""
    differences = [(b["nats"] - a["nats"]) / math.log(2) for a, b in pairs]
    sizes = [a["n_bytes"] for a, _ in pairs]
    ratio = sum(differences) / sum(sizes)
    n = len(pairs)
    residuals = [difference - ratio * size for difference, size in zip(differences, sizes, strict=True)]
    half = _Z * math.sqrt(n / (n - 1) * sum(residual * residual for residual in residuals)) / sum(sizes)
    return Difference(*values, half, f"{n} documents, paired")


def _same_questions(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the pairs of answers if both sides have exactly the same questions; else none."""
    sides = [{_question(sample): sample for sample in side} for side in (before, after)]
    if not sides[0] or sides[0].keys() != sides[1].keys():
        return []
    return [(sides[0][key], sides[1][key]) for key in sides[0]]


def _question(sample: Mapping[str, Any]) -> str:
    """Return the identity of a question: for a document its index, size and beginning."""
    choices = sample.get("choices", sample.get("candidates"))  # results of earlier versions have candidates
    return repr([choices, *(sample.get(key) for key in ("index", "prompt", "gold", "n_bytes", "beginning"))])


def _windows(score: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the window length and overlap of held-out documents, on which bits per byte depend; results that do not
    record the overlap had half a window."""
    seq_len = score.get("seq_len")
    return seq_len, score.get("overlap_tokens", None if seq_len is None else seq_len - seq_len // 2)


def _standard_error(values: Sequence[float]) -> float:
    n = len(values)
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
