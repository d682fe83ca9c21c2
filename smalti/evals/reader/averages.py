"""The averages of the Gauntlet before and after the flags, from the scores of its benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.table import BENCHMARKS, CORE
from smalti.evals.reader.scores import TaskScores
from smalti.evals.statistics.intervals import Estimate

METRIC = "above chance"


def average_scores(gauntlet: Mapping[str, Any], scores: Sequence[TaskScores]) -> list[TaskScores]:
    """Return the scores of categories and core, as ``evals.gauntlet`` computes them.

    ``gauntlet``: what ``results.json`` has under that key. ``scores``: those of the tasks. A benchmark of which no item
    remains counts with its score before.
    """
    by_task = {score.task: score for score in scores}
    baselines = {name: {"baseline": value} for name, value in gauntlet.get("baselines", {}).items()}
    rows = []
    for sides in ([score.before for score in scores], [score.after or score.before for score in scores]):
        values = {
            score.task: {**side.to_score(), **baselines.get(score.task, {})}
            for score, side in zip(scores, sides, strict=True)
        }
        means = averages(values, gauntlet.get("missing", {}), gauntlet["mode"])
        rows.append({**means["categories"], "core average": means["core_average"]})
    before, after = rows
    weights = {
        name: _weights(name, means["baselines"], list(before)) for name, mean in before.items() if mean is not None
    }
    return [
        TaskScores(
            task=name.replace("_", " "),
            metric=METRIC,
            before=Estimate.from_score(before[name]),
            after=Estimate.from_score(after[name]),
            excluded=sum(by_task[task].excluded for task in weights[name]),
            accepted=sum(by_task[task].accepted for task in weights[name]),
            weights=weights[name],
        )
        for name in weights
    ]


def _weights(average: str, baselines: Mapping[str, float], categories: Sequence[str]) -> dict[str, float]:
    """Return how much an average grows with the accuracy of each benchmark: a weight / (1 - baseline)."""
    core = [category for category in CORE if category in categories]
    weights: dict[str, float] = {}
    for category in core if average == "core average" else [average]:
        names = [each.name for each in BENCHMARKS if each.category == category and each.name in baselines]
        share = 1 / len(names) / (len(core) if average == "core average" else 1)
        weights |= {name: share / (1 - baselines[name]) for name in names}
    return weights
