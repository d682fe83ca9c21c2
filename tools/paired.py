"""Paired timing: run two functions by turns in one process, and compute the ratio of each pair.

On a machine with changing load a single time means little, but the load slows both halves of a pair alike. The result
is the median of the ratios with the 10th and 90th percentile (for few pairs, close to the smallest and largest ratio).
Absolute times are not comparable between runs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """How many times longer ``slow`` took than ``fast``: median and spread over the pairs, and both median times."""

    slow: str
    fast: str
    ratio: float
    ratio_p10: float
    ratio_p90: float
    slow_s: float
    fast_s: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.slow} / {self.fast}: {self.ratio:.2f}x  (p10 {self.ratio_p10:.2f}, p90 {self.ratio_p90:.2f}; "
            f"{self.slow_s * 1e3:.3f} ms / {self.fast_s * 1e3:.3f} ms, {self.pairs} pairs)"
        )

    def figures(self) -> dict[str, Any]:
        """Return the ratio as plain JSON."""
        return asdict(self)


def paired(slow: Callable[[], object], fast: Callable[[], object], *, names: tuple[str, str], pairs: int = 21) -> Ratio:
    """Time ``slow`` and ``fast`` by turns, ``pairs`` times, after one warm-up of each; the order alternates."""
    if pairs < 3:
        raise ValueError(f"{pairs} pairs give no spread; use at least 3")
    slow()
    fast()
    slow_s, fast_s = [], []
    for turn in range(pairs):
        if turn % 2:
            fast_s.append(_time(fast))
            slow_s.append(_time(slow))
        else:
            slow_s.append(_time(slow))
            fast_s.append(_time(fast))
    return ratio_of(slow_s, fast_s, names=names)


def ratio_of(slow_s: list[float], fast_s: list[float], *, names: tuple[str, str]) -> Ratio:
    """Return the ratio of times measured elsewhere: entry n of both lists is one pair, measured close together."""
    ratios = [a / b for a, b in zip(slow_s, fast_s, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Ratio(
        slow=names[0],
        fast=names[1],
        ratio=statistics.median(ratios),
        ratio_p10=tenths[0],
        ratio_p90=tenths[-1],
        slow_s=statistics.median(slow_s),
        fast_s=statistics.median(fast_s),
        pairs=len(ratios),
    )


def _time(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
