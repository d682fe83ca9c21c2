"""Scores of evaluations as the registry keeps them: of each suite and task the value, its interval and its n."""

from collections.abc import Mapping
from typing import Any

Scores = dict[str, dict[str, dict[str, Any]]]
"""Suite -> task -> ``{"metric", "value", "interval", "n", "time"}``."""


def scores_of(results: Mapping[str, Any]) -> Scores:
    """Return the scores in a ``results.json``, the Gauntlet's core average among them."""
    tasks = {name: score for name, score in (results.get("tasks") or {}).items() if isinstance(score, Mapping)}
    core = (results.get("gauntlet") or {}).get("core_average")
    if core:
        tasks["core average"] = {"metric": "above chance", **core}
    scores = {
        name: {key: score.get(key) for key in ("metric", "value", "interval", "n")} | {"time": results.get("time")}
        for name, score in tasks.items()
    }
    return {str(results.get("suite")): scores} if scores else {}


def merged(before: Scores, later: Scores) -> Scores:
    """Return both; of a task in both that with more items, at equal n the later."""
    result = {suite: dict(tasks) for suite, tasks in before.items()}
    for suite, tasks in later.items():
        into = result.setdefault(suite, {})
        for name, score in tasks.items():
            if name not in into or (score["n"] or 0) >= (into[name]["n"] or 0):
                into[name] = score
    return result
