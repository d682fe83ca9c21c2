"""Names the odd node from the reports of all nodes, and of one node from a saved report of a good one.

With three nodes or more the others are the measure: the value that most have, the median of a speed. With fewer, a
saved report is; without one, two nodes that differ are both named.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.base.units import format_bytes, format_seconds

Json = dict[str, Any]

SLOW_FRAC = 0.75
"""Products are slow below this share of the median, or of the saved report."""
SLOW_DISK_FRAC = 0.25
"""The same for the disk, whose speed varies more."""
SLOW_LINK_FRAC = 0.5
"""A link is slow below this share of the median of all links: two neighbours at once share switches and processors."""
CLOCK_S = 0.5
"""A clock that is further off is named: credentials and the order of logs depend on it."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and with which nodes."""

    kind: str
    """``missing``, ``driver``, ``gpu_memory``, ``disk``, ``slow_disk``, ``wrong_products``, ``slow_products``,
    ``link``, ``slow_link``, ``clock``, ``probe`` or ``differs``."""
    nodes: tuple[str, ...]
    """Host names; of two nodes that differ from each other, both."""
    message: str
    speed_frac: float | None = None
    """Speed of slow links as a share of the usual one; 0 for links that do not work."""


def judge(reports: Sequence[Json | None], good: Json | None = None) -> list[Finding]:
    """Return what is wrong with the nodes, by their order; ``good`` is the saved report of a good node."""
    reports = with_names(reports)
    missing = [number for number, report in enumerate(reports) if report is None]
    findings = [Finding("missing", (f"node {number}",), "did not answer") for number in missing]
    present = [report for report in reports if report is not None]
    for report in present:
        findings += [Finding(problem["kind"], (report["node"],), problem["message"]) for problem in report["problems"]]
        findings += [
            Finding(
                "wrong_products", (report["node"],),
                f"a product in {row['dtype']} on {row['device']} is wrong in {row['wrong']} rows",
            )
            for row in report.get("products", ())
            if row["wrong"]
        ]  # fmt: skip
    slow = _slow(present, good)
    return findings + _different(present, good) + slow + _links(reports, slow) + _clocks(reports)


def with_names(reports: Sequence[Json | None]) -> list[Json | None]:
    """Return the reports, with the number of the node behind host names that several have."""
    hosts = Counter(report["node"] for report in reports if report is not None)
    return [
        report | {"node": f"{report['node']} (node {number})"} if report and hosts[report["node"]] > 1 else report
        for number, report in enumerate(reports)
    ]


def _different(reports: Sequence[Json], good: Json | None) -> list[Finding]:
    """Name the nodes with another fact than the saved report, or than most."""
    findings = []
    for fact in sorted({fact for report in [*reports, *([good] if good else [])] for fact in report["facts"]}):
        values = {report["node"]: report["facts"].get(fact, "absent") for report in reports}
        if good is not None:
            usual = good["facts"].get(fact, "absent")
            of_whom = "the saved report"
        else:
            (usual, count), *others = Counter(values.values()).most_common()
            of_whom = f"{count} of {len(values)} nodes"
            if others and count == others[0][1]:
                listed = ", ".join(f"{node}: {value}" for node, value in values.items())
                findings.append(
                    Finding("differs", tuple(values), f"{fact} differs, and no value is that of most: {listed}")
                )
                continue
        findings += [
            Finding("differs", (node,), f"{fact} is {value}; that of {of_whom}: {usual}")
            for node, value in values.items()
            if value != usual
        ]
    return findings


def _slow(reports: Sequence[Json], good: Json | None) -> list[Finding]:
    """Name the devices and disks that are slow."""
    findings = []
    speeds = [_speeds(report) for report in reports]
    usual = _speeds(good) if good is not None else _medians(speeds)
    for report, of_node in zip(reports, speeds, strict=True):
        for (kind, what), speed in of_node.items():
            limit = usual.get((kind, what))
            frac = SLOW_DISK_FRAC if kind == "slow_disk" else SLOW_FRAC
            if limit is not None and speed < frac * limit:
                share = f"{speed / limit:.0%} of {'the saved' if good else 'the median'} speed"
                findings.append(Finding(kind, (report["node"],), f"{what}: {share}"))
    return findings


def _speeds(report: Json) -> dict[tuple[str, str], float]:
    speeds = {
        ("slow_products", f"products in {row['dtype']} on {row['device']}"): float(row["flops_per_s"])
        for row in report.get("products", ())
    }
    if "disk_bytes_per_s" in report:
        speeds["slow_disk", "writing to disk"] = float(report["disk_bytes_per_s"])
    return speeds


def _medians(speeds: Sequence[dict[tuple[str, str], float]]) -> dict[tuple[str, str], float]:
    """Return the median of each speed that at least three nodes have."""
    by_name: dict[tuple[str, str], list[float]] = {}
    for of_node in speeds:
        for name, speed in of_node.items():
            by_name.setdefault(name, []).append(speed)
    return {name: statistics.median(values) for name, values in by_name.items() if len(values) >= 3}


def _links(reports: Sequence[Json | None], slow: Sequence[Finding]) -> list[Finding]:
    """Name nodes most of whose links are slow or broken, and the single links between other nodes.

    A node that is slow itself is named for its links, not the partners.
    """
    named = {node for finding in slow for node in finding.nodes}
    suspects = [rank for rank, report in enumerate(reports) if report is not None and report["node"] in named]
    speeds: dict[tuple[int, int], float] = {}
    for rank, report in enumerate(reports):
        for link in report.get("links", ()) if report else ():
            if reports[link["partner"]] is not None:
                pair = (min(rank, link["partner"]), max(rank, link["partner"]))
                speed = max(link["bytes_per_s"].values()) if "bytes_per_s" in link else 0.0
                speeds[pair] = min(speed, speeds.get(pair, speed))
    median = _usual_speed(speeds)
    bad = {pair: speed for pair, speed in speeds.items() if speed == 0.0 or speed < SLOW_LINK_FRAC * median}
    findings = []
    while bad:
        worst, count = Counter(rank for pair in bad for rank in pair).most_common(1)[0]
        of_node = {pair: speed for pair, speed in bad.items() if worst in pair}
        all_of = sum(worst in pair for pair in speeds)
        ranks: tuple[int, ...] = (worst,)
        if count == 1 or count <= all_of / 2:
            pair = next(iter(of_node))
            of_node = {pair: bad[pair]}
            ranks = next(((rank,) for rank in pair if rank in suspects), pair)
        kind = "link" if all(speed == 0.0 for speed in of_node.values()) else "slow_link"
        names = tuple(str((reports[rank] or {})["node"]) for rank in ranks)
        speed = statistics.median(of_node.values())
        message = (
            "no all-reduce succeeds"
            if kind == "link"
            else f"{format_bytes(speed)}/s; the median: {format_bytes(median)}/s"
        )
        others = f"with {len(of_node)} of {all_of} partners" if len(ranks) == 1 else "between the two"
        share = speed / median if median else 0.0
        findings.append(Finding(kind, names, f"all-reduce {others}: {message}", share))
        bad = {pair: speed for pair, speed in bad.items() if pair not in of_node}
    return findings


def _usual_speed(speeds: Mapping[tuple[int, int], float]) -> float:
    """Return the median over the nodes of the median of their links: one node with slow links does not change it."""
    by_node: dict[int, list[float]] = {}
    for pair, speed in speeds.items():
        for rank in pair:
            by_node.setdefault(rank, []).append(speed)
    return statistics.median_high(map(statistics.median_high, by_node.values())) if by_node else 0.0


def _clocks(reports: Sequence[Json | None]) -> list[Finding]:
    """Name the nodes whose clock is off from those of more than half of their partners."""
    findings, off = [], {}
    for report in filter(None, reports):
        offsets = [link["ahead_s"] for link in report.get("links", ()) if "ahead_s" in link]
        far = [offset for offset in offsets if abs(offset) > CLOCK_S]
        if len(far) > len(offsets) / 2:
            off[report["node"]] = statistics.median(far)
    if len(off) > 1 and len(off) == sum(report is not None for report in reports):
        apart = format_seconds(max(off.values()) - min(off.values()))
        return [Finding("clock", tuple(off), f"their clocks are up to {apart} apart")]
    for node, ahead_s in off.items():
        side = "ahead of" if ahead_s > 0 else "behind"
        findings.append(Finding("clock", (node,), f"its clock is {format_seconds(abs(ahead_s))} {side} the others"))
    return findings
