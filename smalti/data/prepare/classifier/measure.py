"""How good scores are: the area under the ROC curve with its interval, calibration, and reliability."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def area_under_curve(good: F64, bad: F64) -> tuple[float, tuple[float, float]]:
    """Return the probability that a good document scores above a bad one, and its 95 % interval (DeLong).

    The interval is that of its logit, so that it is inside 0 to 1; with an area of 0 or 1 it is that of the rule of
    three: 1 - 3 / n.
    """
    above_bad, above_good = _placements(good, bad), 1 - _placements(bad, good)
    area = float(above_bad.mean())
    n_smaller = min(len(good), len(bad))
    if not 0 < area < 1:
        edge = min(1.0, 3 / n_smaller)
        return area, (0.0, edge) if area == 0 else (1 - edge, 1.0)
    error = math.sqrt(above_bad.var(ddof=1) / len(good) + above_good.var(ddof=1) / len(bad))
    center, half = math.log(area / (1 - area)), 1.96 * error / (area * (1 - area))
    return area, (1 / (1 + math.exp(half - center)), 1 / (1 + math.exp(min(-half - center, 700.0))))


def calibrate(logits: F64, labels: F64) -> tuple[float, float]:
    """Return slope and offset of the probabilities (Platt): the most likely, by Newton's method.

    Labels are moved from 0 and 1 as Platt did, so that separable scores have finite probabilities.
    """
    n_good, n_bad = float(labels.sum()), float((1 - labels).sum())
    targets = np.where(labels > 0, (n_good + 1) / (n_good + 2), 1 / (n_bad + 2))
    scale = float(np.abs(logits).max()) or 1.0
    design = np.stack([logits / scale, np.ones_like(logits)], axis=1)
    solution = np.zeros(2)
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(design @ solution, -35, 35)))
        curvature = design.T @ (design * (p * (1 - p))[:, None]) + 1e-6 * np.eye(2)
        move = np.linalg.solve(curvature, design.T @ (targets - p))
        solution += np.clip(move, -5, 5)
        if float(np.abs(move).max()) < 1e-10:
            break
    return float(solution[0]) / scale, float(solution[1])


def reliability(probabilities: F64, labels: F64, *, bins: int = 10) -> list[dict[str, Any]]:
    """Return, for each tenth of the range of probabilities that has documents, their mean and the share of good."""
    place = np.minimum((probabilities * bins).astype(int), bins - 1)
    rows = []
    for number in sorted(set(place.tolist())):
        inside = place == number
        rows.append(
            {
                "from": number / bins,
                "documents": int(inside.sum()),
                "mean_score": float(probabilities[inside].mean()),
                "good_frac": float(labels[inside].mean()),
            }
        )
    return rows


def calibration_error(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean distance of scores from the share of good documents, over the rows of ``reliability``."""
    total = sum(row["documents"] for row in rows)
    return float(sum(row["documents"] * abs(row["mean_score"] - row["good_frac"]) for row in rows) / max(total, 1))


def _placements(values: F64, others: F64) -> F64:
    """Return for each value the share of ``others`` below it, ties counted half."""
    ordered = np.sort(others)
    below, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return np.asarray((below + upto) / (2 * len(others)), np.float64)
