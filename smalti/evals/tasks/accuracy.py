"""The score of a task from its samples: accuracy with its error, soft probability, bits per byte."""

from collections.abc import Sequence
from typing import Any

from smalti.evals.statistics.averages import average
from smalti.evals.statistics.intervals import mean, verdict


def accuracy(samples: Sequence[dict[str, Any]], chance: float) -> dict[str, Any]:
    """Return the accuracy with n, standard error, 95 % interval and chance, and means of what the samples hold.

    With categories it is the mean of their accuracies. Items of one cluster are dependent.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        parts.setdefault(str(sample.get("category", "")), []).append(sample)
    means = {
        name: mean([bool(row["correct"]) for row in part], [row.get("cluster") for row in part])
        for name, part in parts.items()
    }
    total = average(list(means.values())) if len(means) > 1 else next(iter(means.values()))
    score: dict[str, Any] = {
        "metric": "accuracy",
        "accuracy": total.value,
        **total.to_score(),
        "correct": sum(bool(sample["correct"]) for sample in samples),
        "chance": chance,
        "verdict": verdict(total.interval or (0.0, 1.0), chance),
    }
    if len(parts) > 1:
        score["categories"] = {
            name: {"accuracy": part.value, "n": part.n, "interval": part.interval and list(part.interval)}
            for name, part in means.items()
        }
    if all("gold_probability" in sample for sample in samples):
        score["gold_probability"] = sum(sample["gold_probability"] for sample in samples) / len(samples)
        n_bytes = sum(sample["gold_bytes"] for sample in samples)
        score["bits_per_byte"] = sum(sample["bits_per_byte"] * sample["gold_bytes"] for sample in samples) / n_bytes
    return score
