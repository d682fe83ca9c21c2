"""``smalti fleet check``: the measurement with its progress, and its result as text and JSON."""

import secrets
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from smalti.base import database, store
from smalti.base.env import fleet_attempt, world
from smalti.base.errors import CheckFailed, RetryableError, SmaltiError
from smalti.base.units import format_bytes, format_seconds
from smalti.cli.tables import table
from smalti.fleet.check.judge import judge, with_names
from smalti.fleet.check.run import check, read_report
from smalti.fleet.ledger import records
from smalti.fleet.messages import incidents, outbox

Json = dict[str, Any]


def run(folder: Path, *, save: Path | None, against: Path | None, timeout_s: float, report: Any) -> Json:
    """Check, write ``save`` on the first node, and return ``reports`` and ``findings`` as JSON values."""
    good = read_report(against) if against is not None else None
    here = world()
    reports = check(folder, here, good=good, timeout_s=timeout_s, report=report)
    if save is not None and here.is_first and reports[here.rank] is not None:
        store.write_json(save, reports[here.rank])
    return {"node": here.rank, "reports": reports, "findings": [asdict(finding) for finding in judge(reports, good)]}


def record(result: Json, *, cordon: bool, is_compared: bool) -> list[str]:
    """Record a result in the ledger of its nodes, on the first node; returns what was done with cordons, in words.

    A check inside a run is recorded from the run's events.
    """
    if result["node"] != 0 or fleet_attempt() is not None:
        return []
    nodes = [report["node"] for report in with_names(result["reports"]) if report is not None]
    source = f"check/{secrets.token_hex(8)}"
    try:
        with database.transaction() as db:
            done = records.add_check(db, source, nodes, result["findings"], cordon=cordon, is_compared=is_compared)
            for node in nodes if cordon else ():
                _add_incident(db, source, node, result["findings"], done)
        if cordon:
            outbox.deliver()
        return done
    except SmaltiError as error:
        return [f"the check is not recorded: {error}"]


def _add_incident(db: Connection, source: str, node: str, findings: Sequence[Json], done: Sequence[str]) -> None:
    of_node = [finding for finding in findings if node in finding["nodes"]]
    actions = [line for line in done if line.startswith(f"{node}: ")]
    if not of_node or not actions:
        return
    is_cordoned = actions == [f"{node}: cordoned"]
    incidents.add(
        db,
        incidents.Incident(
            f"{source}/{node}",
            "critical" if is_cordoned else "high",
            "node cordoned" if is_cordoned else "node failed its check",
            ", ".join(sorted({finding["kind"] for finding in of_node})),
            "; ".join(finding["message"] for finding in of_node)[:1000],
            actions[0],
            node,
        ),
    )


def text(result: Json) -> str:
    """Return the table of the nodes, and what is wrong."""
    rows = [_row(number, report) for number, report in enumerate(result["reports"])]
    head = ("", "node", "fp32", "bf16", "disk", "all-reduce", "latency", "clock")
    return "\n".join([table(head, rows), "", *_verdict(result["findings"])])


def raise_for(result: Json, *, own: bool) -> None:
    """Raise CheckFailed where something is wrong; with ``own`` only where it is of this node alone, and no difference
    of versions or settings, which was there when the run began. RetryableError with ``own`` where the first node, which
    compares, was not reached.
    """
    findings, number = result["findings"], result["node"]
    if own:
        if number and result["reports"][0] is None:
            raise RetryableError("the first node was not reached, so the nodes are not compared", hint="check again")
        here = with_names(result["reports"])[number]
        names = [f"node {number}" if here is None else here["node"]]
        findings = [each for each in findings if list(each["nodes"]) == names and each["kind"] != "differs"]
    if findings:
        names = sorted({node for finding in findings for node in finding["nodes"]})
        raise CheckFailed(
            f"{len(findings)} findings on {', '.join(names)}",
            hint="leave these nodes out, or repair them and check again",
        )


def _verdict(findings: Sequence[Json]) -> list[str]:
    if not findings:
        return ["nothing found"]
    return [f"{' and '.join(finding['nodes'])}: {finding['kind']}: {finding['message']}" for finding in findings]


def _row(number: int, report: Json | None) -> tuple[str, ...]:
    if report is None:
        return (str(number), "no answer", *["-"] * 6)
    links = [link for link in report.get("links", ()) if "bytes_per_s" in link]
    slowest = {
        dtype: min((row["flops_per_s"] for row in report.get("products", ()) if row["dtype"] == dtype), default=None)
        for dtype in ("fp32", "bf16")
    }
    products = ["-" if speed is None else f"{speed / 1e9:,.0f} GFLOP/s" for speed in slowest.values()]
    disk = f"{format_bytes(report['disk_bytes_per_s'])}/s" if "disk_bytes_per_s" in report else "-"
    fast = f"{format_bytes(statistics.median(max(link['bytes_per_s'].values()) for link in links))}/s" if links else "-"
    latency = format_seconds(statistics.median(link["latency_s"] for link in links)) if links else "-"
    clock = f"{statistics.median(link['ahead_s'] for link in links):+.3f} s" if links else "-"
    return (str(number), report["node"], *products, disk, fast, latency, clock)
