"""Examples near the limits of rules, for the report: of each rule the documents closest to them."""

import math
from typing import Any

from smalti.data.build.policy import RULES

_EXAMPLES = 3
_CHARACTERS = 160


class NearLimits:
    """Collects the examples; of equally close documents the first stay."""

    def __init__(self) -> None:
        self._examples: dict[tuple[str, bool], list[tuple[float, dict[str, Any]]]] = {}

    def add(self, source: str, row: dict[str, Any], dropped_by: str | None) -> None:
        """Look at the scores of a row of ANNOTATED; ``dropped_by``: the rule of the policy that drops it."""
        for entry in row["scores"]:
            name, score = entry["rule"], entry["score"]
            is_dropped = name == dropped_by
            if dropped_by is not None and not is_dropped:
                continue
            distance = _distance(score, RULES[name].low, RULES[name].high)
            examples = self._examples.setdefault((name, is_dropped), [])
            if len(examples) == _EXAMPLES and distance >= examples[-1][0]:
                continue
            text = " ".join(row["text"][:_CHARACTERS].split())
            examples.append((distance, {"id": row["id"], "source": source, "score": score, "text": text}))
            examples.sort(key=lambda example: example[0])
            del examples[_EXAMPLES:]

    def as_json(self) -> dict[str, Any]:
        """Return rule -> ``limits``, ``kept`` and ``dropped`` examples; only rules that dropped something."""
        rules = sorted(name for name, is_dropped in self._examples if is_dropped)
        return {
            name: {
                "low": None if math.isinf(RULES[name].low) else RULES[name].low,
                "high": None if math.isinf(RULES[name].high) else RULES[name].high,
                "dropped": [example for _, example in self._examples[name, True]],
                "kept": [example for _, example in self._examples.get((name, False), [])],
            }
            for name in rules
        }


def _distance(score: float, low: float, high: float) -> float:
    """Distance to the nearest limit, relative to it."""
    return min(abs(score - limit) / (abs(limit) or 1.0) for limit in (low, high) if not math.isinf(limit))
