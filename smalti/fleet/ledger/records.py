"""The records of a node: each check and fault once, however often it is seen; and an overview of all nodes.

A record has a source that no other has (a check and its node, or an event of a run folder), so a controller that was
killed reads the events again and records none twice.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from smalti.base import clock
from smalti.fleet.ledger import cordons
from smalti.fleet.queue.runs import Run

Kind = Literal["check", "fault"]
Json = dict[str, Any]

FAULTS = ("rank_died", "rank_hung", "rank_unresponsive", "node_lost", "oom", "not_finite")
CHECK = "node_checked"
"""The events that are recorded."""
_RECENT_S = 3600.0
"""An older check of an event cordons no node: the node may have been repaired since."""


def add(
    db: sqlite3.Connection, node: str, kind: Kind, result: str, message: str, *, source: str,
    time_s: float | None = None, run: int | None = None,
) -> bool:  # fmt: skip
    """Record a check or fault of a node; returns whether it was not recorded before."""
    done = db.execute(
        "INSERT OR IGNORE INTO fleet_node_records (node, time_s, kind, result, message, run, source) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (node, clock.wall_s() if time_s is None else time_s, kind, result, message, run, source),
    )
    return done.rowcount > 0


def add_check(
    db: sqlite3.Connection,
    source: str,
    nodes: Sequence[str],
    findings: Sequence[Json],
    *,
    cordon: bool,
    is_compared: bool,
) -> list[str]:
    """Record a check of several nodes together; returns what was done with cordons, in words.

    A node that is healthy loses the machine's cordon if it was compared with a good one (``is_compared``) or with two
    others. With ``cordon`` those that a finding names alone get one: of two that are named together it is not known
    which.
    """
    done, several = [], len(nodes) >= 3
    for node in nodes:
        of_node = [finding for finding in findings if node in finding["nodes"]]
        message = "; ".join(f"{finding['kind']}: {finding['message']}" for finding in of_node)
        add(db, node, "check", "unhealthy" if of_node else "healthy", message, source=f"{source}/{node}")
        lifts = not of_node and (several or is_compared)
        if lifts and cordons.lift_by_machine(db, node, with_links=several):
            done.append(f"{node}: the cordon of {cordons.MACHINE} is lifted")
        if cordon and any(len(finding["nodes"]) == 1 for finding in of_node):
            why_not = cordons.set_by_machine(db, node, message, len(known(db)))
            done.append(f"{node}: {'cordoned' if why_not is None else f'not cordoned: {why_not}'}")
    return done


def add_event(db: sqlite3.Connection, run: Run, node: str | None, event: Mapping[str, Any]) -> str | None:
    """Record an event of a run: a check, or a fault of its node, where that is known.

    Returns what was done with a cordon, in words; None: nothing, or the event was recorded before.
    """
    kind, name = event["event"], event.get("node") or node
    if name is None:
        return None
    source = f"{run.folder}/{event.get('attempt')}/{event.get('time')}/{kind}/{event.get('rank')}/{event.get('node')}"
    time_s = clock.seconds_of(event.get("time")) or clock.wall_s()
    if kind in FAULTS:
        rank = "" if event.get("rank") is None else f"rank {event['rank']} "
        how = event.get("signal") or event.get("why") or event.get("code") or kind
        add(db, name, "fault", kind, f"{rank}of {run.id}: {how}", source=source, time_s=time_s, run=run.number)
        return None
    if kind != CHECK:
        return None
    message = " ".join(str(line) for line in event.get("lines") or ())[-300:]
    result = str(event.get("result"))
    new = add(db, name, "check", result, message, source=source, time_s=time_s, run=run.number)
    if not new or result != "unhealthy" or clock.wall_s() - time_s > _RECENT_S:
        return None
    why_not = cordons.set_by_machine(db, name, f"the check of {run.id} failed: {message}", len(known(db)))
    return f"{name}: {'cordoned' if why_not is None else f'not cordoned: {why_not}'}"


def of_node(db: sqlite3.Connection, node: str) -> list[Json]:
    """Return the records of a node, newest first."""
    rows = db.execute(
        "SELECT time_s, kind, result, message, run FROM fleet_node_records WHERE node=? ORDER BY time_s DESC, "
        "number DESC", (node,),
    )  # fmt: skip
    return [dict(row) for row in rows]


def cordons_of(db: sqlite3.Connection, node: str) -> list[Json]:
    """Return all cordons that a node has or had, newest first."""
    rows = db.execute(
        "SELECT owner, by_machine, reason, since_s, until_s, lifted_s, lifted_by FROM fleet_cordons WHERE node=? "
        "ORDER BY number DESC", (node,),
    )  # fmt: skip
    return [{**dict(row), "by_machine": bool(row["by_machine"])} for row in rows]


def runs_of(db: sqlite3.Connection, node: str) -> list[Json]:
    """Return the attempts that ran on a node, newest first."""
    rows = db.execute(
        "SELECT name || '-' || run AS run, fleet_attempts.number AS attempt, started_s, ended_s, fleet_attempts.code "
        "FROM fleet_attempts JOIN fleet_runs ON fleet_runs.number=run WHERE node=? AND started_s IS NOT NULL "
        "ORDER BY started_s DESC", (node,),
    )  # fmt: skip
    return [dict(row) for row in rows]


def known(db: sqlite3.Connection) -> list[str]:
    """Return the nodes that have a record, a cordon or an attempt, by name."""
    rows = db.execute(
        "SELECT node FROM fleet_node_records UNION SELECT node FROM fleet_cordons "
        "UNION SELECT node FROM fleet_attempts WHERE node IS NOT NULL ORDER BY node"
    )
    return [row["node"] for row in rows]


def overview(db: sqlite3.Connection) -> list[Json]:
    """Return of each node its state, cordon, last check, number of faults and attempts, and the runs that it has now.

    The state is ``cordoned``, else ``unhealthy`` or ``healthy`` by its last check that had a result, else ``unknown``.
    """
    now, nodes = cordons.active(db), []
    for node in known(db):
        records, attempts = of_node(db, node), runs_of(db, node)
        checks = [record for record in records if record["kind"] == "check"]
        last = next((check["result"] for check in checks if check["result"] in ("healthy", "unhealthy")), "unknown")
        nodes.append({
            "node": node,
            "state": "cordoned" if node in now else last,
            "cordon": asdict(now[node]) if node in now else None,
            "last_check": checks[0] if checks else None,
            "checks": len(checks),
            "faults": len(records) - len(checks),
            "attempts": len(attempts),
            "runs": [attempt["run"] for attempt in attempts if attempt["ended_s"] is None],
        })  # fmt: skip
    return nodes
