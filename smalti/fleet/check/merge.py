"""Merges what a node measures in several rounds. Other work only slows a measurement, so the best of each counts.

What is slow in one round may be so by chance; what is slow in all of them is. Values are not averaged away: a product
that was wrong in one round is wrong.
"""

from collections.abc import Sequence
from typing import Any

from smalti.fleet.check.judge import judge

Json = dict[str, Any]

_ROUNDS = {(False, False): 2, (False, True): 4, (True, False): 5, (True, True): 10}
"""Rounds to measure where (speeds vary between rounds, something is slow)."""
_STEADY_FRAC = 0.8
"""Speeds vary, so other work runs beside the check, if a product had less than this share of its best in a round."""
_MEASURED = ("slow_products", "slow_disk", "slow_link", "link")
"""Kinds of findings that another round may show to have been chance."""
_CLEAR_FRAC = 0.1
"""Links with less than this share of the usual speed in four rounds are not so by chance, whatever else runs."""


def rounds_needed(reports: Sequence[Json | None], good: Json | None = None) -> int:
    """Return how many rounds are to be measured, as far as the reports of those so far show."""
    rows = [row for report in reports if report is not None for row in report.get("products", ())]
    varies = any(row["slowest_flops_per_s"] < _STEADY_FRAC * row["flops_per_s"] for row in rows)
    slow = [finding for finding in judge(reports, good) if finding.kind in _MEASURED]
    is_clear = bool(slow) and all(
        finding.speed_frac is not None and finding.speed_frac < _CLEAR_FRAC for finding in slow
    )
    return _ROUNDS[varies and not is_clear, bool(slow)]


def merge(report: Json, measured: Json) -> Json:
    """Return the report of a node with another round: ``products``, ``links`` and ``disk_bytes_per_s``, if measured."""
    merged = report | {"rounds": report.get("rounds", 0) + 1}
    for name, same, better in (("products", ("device", "dtype"), _product), ("links", ("partner",), _link)):
        if name in measured:
            before = {tuple(row[key] for key in same): row for row in report.get(name, ())}
            rows = [(tuple(row[key] for key in same), row) for row in measured[name]]
            merged[name] = [better(before[key], row) if key in before else row for key, row in rows]
    if "disk_bytes_per_s" in measured:
        merged["disk_bytes_per_s"] = max(measured["disk_bytes_per_s"], report.get("disk_bytes_per_s", 0.0))
    return merged


def _product(one: Json, other: Json) -> Json:
    best = {name: max(one[name], other[name]) for name in ("flops_per_s", "wrong")}
    return one | best | {"slowest_flops_per_s": min(one["slowest_flops_per_s"], other["slowest_flops_per_s"])}


def _link(one: Json, other: Json) -> Json:
    if "problem" in one or "problem" in other:  # a pair that fails is a link that fails if it never succeeds
        return other if "problem" in one else one
    sooner = min(one, other, key=lambda link: float(link["latency_s"]))
    sizes = {*one["bytes_per_s"], *other["bytes_per_s"]}
    speeds = {size: max(link["bytes_per_s"].get(size, 0.0) for link in (one, other)) for size in sizes}
    return sooner | {"bytes_per_s": dict(sorted(speeds.items(), key=lambda row: int(row[0])))}
