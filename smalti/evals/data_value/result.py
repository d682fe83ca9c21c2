"""The result of a comparison: losses and differences with intervals over the seeds, and what the better one is worth.

A difference is of runs with the same seed (same initial weights); intervals are of Student's t, 95 %. They are of the
seeds: held-out text is the same in all runs.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from smalti.data.prepare.versions.prepare import EXTRA
from smalti.evals.statistics.student import quantile

MEAN = "mean"
"""Name of the mean over held-out sets."""
NO_DIFFERENCE = "no difference shown"
DEPENDS = "depends on the held-out text"
_LEVEL = 0.975
Curves = Mapping[str, Sequence[Mapping[str, Any]]]


def compared(curves: Curves) -> dict[str, Any]:
    """Compare the runs of versions (``runs.curves``): each with the first version, and with the one before it.

    Returns:
        ``main``: the held-out set that decides, ``given`` or the mean of all; ``scores``: by held-out set, of each
        version ``value`` and ``interval`` in bits per byte; ``pairs``: see ``pair``.
    """
    names = list(next(iter(curves.values()))[0]["bits_per_byte"])
    main = EXTRA if EXTRA in names else MEAN if len(names) > 1 else names[0]
    names = names if main in names else [*names, MEAN]
    return {
        "main": main,
        "scores": {name: {version: _score(_ends(runs, name)) for version, runs in curves.items()} for name in names},
        "pairs": [pair(curves, names, main, *versions) for versions in pairs(list(curves))],
    }


def pairs(versions: Sequence[str]) -> list[tuple[str, str]]:
    """Return the versions that are compared: the first with all others, and each with the next."""
    with_first = [(versions[0], version) for version in versions[1:]]
    return list(dict.fromkeys([*with_first, *itertools.pairwise(versions)]))


def pair(curves: Curves, names: Sequence[str], main: str, first: str, second: str) -> dict[str, Any]:
    """Compare two versions.

    Returns:
        ``first``, ``second``; ``differences``: by held-out set, second - first in bits per byte (``value``,
        ``interval``, ``verdict``); ``verdict``: that of ``main``, or ``DEPENDS`` where that is the mean of sets that
        show opposites; ``worth``: see ``worth``, None without a better version.
    """
    differences: dict[str, dict[str, Any]] = {}
    for name in names:
        ends = zip(_ends(curves[first], name), _ends(curves[second], name), strict=True)
        mean, interval = mean_and_interval([b - a for a, b in ends])
        shown = interval[0] > 0 or interval[1] < 0
        verdict = f"{second if mean < 0 else first} better" if shown else NO_DIFFERENCE
        differences[name] = {"value": mean, "interval": list(interval), "verdict": verdict}
    verdict = differences[main]["verdict"]
    if main == MEAN and len({entry["verdict"] for entry in differences.values()} - {NO_DIFFERENCE}) > 1:
        verdict = DEPENDS
    better, worse = (second, first) if differences[main]["value"] < 0 else (first, second)
    return {
        "first": first,
        "second": second,
        "differences": differences,
        "verdict": verdict,
        "worth": None if verdict in (NO_DIFFERENCE, DEPENDS) else worth(curves, main, better, worse),
    }


def losses(curve: Mapping[str, Any], name: str) -> list[float]:
    """Return the bits per byte of a run on one held-out set, or their mean over the sets, at each point."""
    by_set = curve["bits_per_byte"]
    rows = by_set.values() if name == MEAN else [by_set[name]]
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the mean of two values or more, and its 95 % interval by Student's t."""
    mean = statistics.fmean(values)
    half = quantile(_LEVEL, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def worth(curves: Curves, name: str, better: str, worse: str) -> dict[str, Any]:
    """Return how many tokens of the worse version the better one is worth.

    For each seed: the tokens after which the better version has the final loss of the worse one, on its curve without
    noise (``falling``). ``ratio``: all tokens over these, the geometric mean over the seeds, with its interval.
    ``at_least``: in a run it was below that loss at the first point, so the ratio is a bound. ``rows``: the tokens of
    both for the same loss, on the mean curves; ``worse_tokens`` is None where it was not reached.
    """
    tokens = curves[better][0]["tokens"]
    logs, at_least = [], False
    for good, bad in zip(curves[better], curves[worse], strict=True):
        falls = falling(losses(good, name)), falling(losses(bad, name))
        at_least = at_least or falls[0][0] <= falls[1][-1]
        reached = tokens_at(tokens, falls[0], falls[1][-1])
        if reached is None:  # of this seed it is the worse one
            logs.append(-math.log(tokens[-1] / (tokens_at(tokens, falls[1], falls[0][-1]) or tokens[-1])))
        else:
            logs.append(math.log(tokens[-1] / reached))
    mean, interval = mean_and_interval(logs)
    means = {version: falling(mean_curve(curves, version, name)) for version in (better, worse)}
    rows = []
    for point in sorted({max(0, round(len(tokens) * part / 4) - 1) for part in (1, 2, 3, 4)}):
        needed = tokens_at(tokens, means[worse], means[better][point])
        rows.append({"loss": means[better][point], "tokens": tokens[point], "worse_tokens": needed})
    return {
        "better": better,
        "worse": worse,
        "tokens": tokens[-1],
        "equal_tokens": tokens[-1] / math.exp(mean),
        "ratio": math.exp(mean),
        "interval": None if at_least else [math.exp(end) for end in interval],
        "at_least": at_least,
        "rows": rows,
    }


def mean_curve(curves: Curves, version: str, name: str) -> list[float]:
    """Return the mean over the seeds at each point."""
    return [statistics.fmean(values) for values in zip(*(losses(run, name) for run in curves[version]), strict=True)]


def falling(values: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never rises, in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, n = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] < total / n:
            before = blocks.pop()
            total, n = total + before[0], n + before[1]
        blocks.append((total, n))
    return [total / n for total, n in blocks for _ in range(n)]


def tokens_at(tokens: Sequence[int], fall: Sequence[float], target: float) -> float | None:
    """Return the tokens after which a falling curve is at ``target``, the first point's if it is below; None: never."""
    index = next((index for index, loss in enumerate(fall) if loss <= target), None)
    if index is None or index == 0:
        return None if index is None else float(tokens[0])
    high, low = fall[index - 1], fall[index]
    return tokens[index - 1] + (tokens[index] - tokens[index - 1]) * (high - target) / (high - low)


def _ends(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the last loss of each run."""
    return [losses(run, name)[-1] for run in runs]


def _score(values: list[float]) -> dict[str, Any]:
    mean, interval = mean_and_interval(values)
    return {"value": mean, "interval": list(interval), "by_seed": values}
