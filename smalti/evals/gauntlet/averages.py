"""Category and core averages of the Gauntlet: means of (accuracy - chance) / (1 - chance).

``v0.3`` drops a category with a missing benchmark and averages the others, as LLM Foundry does. ``fixed`` averages what
there is and names what is missing: a partial score cannot be mistaken for a whole one. Errors of benchmarks are
independent, so variances add.
"""

import math
from collections.abc import Mapping
from typing import Any

from smalti.config.task import Mode
from smalti.evals.gauntlet.table import BENCHMARKS, CORE
from smalti.evals.graders.intervals import Z_95


def averages(scores: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str], mode: Mode) -> dict[str, Any]:
    """Return ``scores`` (rescaled), ``categories`` and ``core_average``, each with error and interval, and ``missing``.

    scores: the results of the benchmarks that ran. missing: the others, each with the reason.
    """
    rescaled = {
        benchmark.name: _rescaled(scores[benchmark.name], benchmark.chance)
        for benchmark in BENCHMARKS
        if benchmark.name in scores
    }
    categories: dict[str, dict[str, Any]] = {}
    dropped: dict[str, list[str]] = {}
    for category in dict.fromkeys(benchmark.category for benchmark in BENCHMARKS):
        names = [benchmark.name for benchmark in BENCHMARKS if benchmark.category == category]
        without = [name for name in names if name not in rescaled]
        if len(without) == len(names) or (without and mode == "v0.3"):
            dropped[category] = without
            continue
        categories[category] = _mean([rescaled[name] for name in names if name in rescaled], without)
    core = [categories[category] for category in CORE if category in categories]
    without = [name for part in core for name in part.get("without", ())]
    without += [category for category in CORE if category in dropped]
    return {
        "mode": mode,
        "scores": {name: value for name, (value, _) in rescaled.items()},
        "categories": categories,
        "core_average": _mean([(part["value"], part["stderr"]) for part in core], without) if core else None,
        "dropped": dropped,
        "missing": dict(missing),
    }


def _rescaled(score: Mapping[str, Any], chance: float) -> tuple[float, float]:
    return (score["accuracy"] - chance) / (1 - chance), score["stderr"] / (1 - chance)


def _mean(parts: list[tuple[float, float]], without: list[str]) -> dict[str, Any]:
    value = sum(part for part, _ in parts) / len(parts)
    stderr = math.hypot(*(error for _, error in parts)) / len(parts)
    half = Z_95 * stderr
    mean: dict[str, Any] = {"value": value, "stderr": stderr, "interval": [value - half, value + half], "n": len(parts)}
    if without:
        mean |= {"without": without, "partial": f"partial: without {', '.join(without)}"}
    return mean
