"""Category and core averages of the Gauntlet: means of (accuracy - baseline) / (1 - baseline).

In ``v0.3`` the baseline is the declared chance, in ``fixed`` the share of the most frequent right label, where that is
higher: a model that always gives one letter is not above it.

``v0.3`` drops a category with a missing benchmark and averages the others, as LLM Foundry does. ``fixed`` averages what
there is and names what is missing: a partial score cannot be mistaken for a whole one. Standard errors and
intervals are propagated by ``evals.statistics.averages``.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from smalti.config.task import Mode
from smalti.evals.gauntlet.table import BENCHMARKS, CORE
from smalti.evals.statistics.averages import average
from smalti.evals.statistics.averages import rescaled as rescale
from smalti.evals.statistics.intervals import Estimate


def averages(scores: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str], mode: Mode) -> dict[str, Any]:
    """Return ``scores`` (rescaled), ``categories`` and ``core_average``, each with error and interval, and ``missing``.

    scores: the results of the benchmarks that ran. missing: the others, each with the reason. Also ``baselines``, those
    of the scores.
    """
    baselines = {
        benchmark.name: float(scores[benchmark.name].get("baseline", benchmark.chance))
        for benchmark in BENCHMARKS
        if benchmark.name in scores
    }
    rescaled = {name: rescale(Estimate.from_score(scores[name]), baseline) for name, baseline in baselines.items()}
    categories: dict[str, Estimate] = {}
    partial: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    dropped: dict[str, list[str]] = {}
    for category in dict.fromkeys(benchmark.category for benchmark in BENCHMARKS):
        names = [benchmark.name for benchmark in BENCHMARKS if benchmark.category == category]
        without = [name for name in names if name not in rescaled]
        if len(without) == len(names) or (without and mode == "v0.3"):
            dropped[category] = without
            continue
        partial[category], counts[category] = without, len(names) - len(without)
        categories[category] = average([rescaled[name] for name in names if name in rescaled])
    core = [category for category in CORE if category in categories]
    without = [name for category in core for name in partial[category]]
    without += [category for category in CORE if category in dropped]
    return {
        "mode": mode,
        "baselines": baselines,
        "scores": {name: score.value for name, score in rescaled.items()},
        "categories": {
            category: _score(mean, [category], counts[category], partial[category], rescaled)
            for category, mean in categories.items()
        },
        "core_average": _score(average([categories[category] for category in core]), CORE, len(core), without, rescaled)
        if core
        else None,
        "dropped": dropped,
        "missing": dict(missing),
    }


def _score(
    mean: Estimate, categories: Sequence[str], n: int, without: list[str], present: Container[str]
) -> dict[str, Any]:
    missing = [each for each in BENCHMARKS if each.category in categories and each.name not in present]
    score: dict[str, Any] = {**mean.to_score(), "n": n, "n_missing": len(missing)}
    if without:
        score |= {"without": without, "partial": f"partial: without {', '.join(without)}"}
    return score
