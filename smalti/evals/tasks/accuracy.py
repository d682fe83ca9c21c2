"""The score of a task from its samples: accuracy with its error, soft probability, bits per byte."""

import math
from collections.abc import Sequence
from typing import Any

from smalti.evals.graders.intervals import Z_95, verdict, wilson_interval


def accuracy(samples: Sequence[dict[str, Any]], chance: float) -> dict[str, Any]:
    """Return the accuracy with n, standard error, 95 % interval and chance, and means of what the samples hold.

    With categories it is the mean of their accuracies, and its variance the mean of theirs / their number.
    """
    parts: dict[str, list[bool]] = {}
    for sample in samples:
        parts.setdefault(str(sample.get("category", "")), []).append(bool(sample["correct"]))
    correct = sum(map(sum, parts.values()))
    shares = {name: sum(part) / len(part) for name, part in parts.items()}
    value = sum(shares.values()) / len(shares)
    variance = sum(shares[name] * (1 - shares[name]) / len(part) for name, part in parts.items()) / len(parts) ** 2
    if len(parts) == 1 or variance == 0:
        interval, method = wilson_interval(correct, len(samples)), "wilson 95 %"
    else:
        half = Z_95 * math.sqrt(variance)
        interval, method = (max(0.0, value - half), min(1.0, value + half)), "normal 95 %, categories of equal weight"
    score: dict[str, Any] = {
        "metric": "accuracy",
        "value": value,
        "accuracy": value,
        "stderr": math.sqrt(variance),
        "interval": list(interval),
        "interval_method": method,
        "n": len(samples),
        "correct": correct,
        "chance": chance,
        "verdict": verdict(interval, chance),
    }
    if len(parts) > 1:
        score["categories"] = {name: {"accuracy": shares[name], "n": len(part)} for name, part in parts.items()}
    if all("gold_probability" in sample for sample in samples):
        score["gold_probability"] = sum(sample["gold_probability"] for sample in samples) / len(samples)
        n_bytes = sum(sample["gold_bytes"] for sample in samples)
        score["bits_per_byte"] = sum(sample["bits_per_byte"] * sample["gold_bytes"] for sample in samples) / n_bytes
    return score
