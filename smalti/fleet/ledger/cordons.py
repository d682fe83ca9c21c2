"""Cordons: no run is started on a cordoned node. One of a person is never lifted or shortened by the machine.

The machine cordons a node whose check found something. In any hour it cordons at most 2 nodes, or 10 % of those known
where that is more, so that a check that is wrong everywhere does not empty the fleet. Its cordons end after a day, when
a check of the node finds nothing, or when a person lifts them.
"""

import sqlite3
from dataclasses import dataclass

from smalti.base import clock
from smalti.base.errors import UserError

MACHINE = "smalti"
"""Owner of the machine's cordons."""
_EXPIRES_S = 86400.0
_WINDOW_S = 3600.0
_AT_LEAST, _FRAC = 2, 0.1

_ACTIVE = "lifted_s IS NULL AND (until_s IS NULL OR until_s > ?)"


@dataclass(frozen=True)
class Cordon:
    """Why no run is started on a node."""

    node: str
    owner: str
    by_machine: bool
    reason: str
    since_s: float
    until_s: float | None
    """None: until it is lifted."""


def active(db: sqlite3.Connection) -> dict[str, Cordon]:
    """Return the cordoned nodes; of a person's and the machine's cordon of one node the person's."""
    rows = db.execute(f"SELECT * FROM fleet_cordons WHERE {_ACTIVE} ORDER BY by_machine DESC", (clock.wall_s(),))
    return {
        row["node"]: Cordon(
            row["node"], row["owner"], bool(row["by_machine"]), row["reason"], row["since_s"], row["until_s"]
        )
        for row in rows
    }


def set_by_person(db: sqlite3.Connection, node: str, *, owner: str, reason: str, until_s: float | None) -> None:
    """Cordon a node, in the place of a person's cordon that it has."""
    _lift(db, node, owner, by_machine=False)
    _insert(db, Cordon(node, owner, False, reason, clock.wall_s(), until_s))


def lift_by_person(db: sqlite3.Connection, node: str, *, owner: str) -> None:
    """Lift all cordons of a node. Raises UserError where it has none."""
    lifted = _lift(db, node, owner, by_machine=False) + _lift(db, node, owner, by_machine=True)
    if lifted == 0:
        nodes = ", ".join(sorted(active(db))) or "none is"
        raise UserError(f"'{node}' is not cordoned", allowed=f"a node that is: {nodes}", hint="smalti fleet nodes")


def set_by_machine(db: sqlite3.Connection, node: str, reason: str, known: int) -> str | None:
    """Cordon a node unless it is cordoned; ``known`` is the number of nodes that are known.

    Returns None, or why it was not cordoned.
    """
    cordon = active(db).get(node)
    if cordon is not None:
        return f"it is cordoned by {cordon.owner} already"
    now_s, most = clock.wall_s(), max(_AT_LEAST, int(_FRAC * known))
    rows = db.execute(
        "SELECT DISTINCT node FROM fleet_cordons WHERE by_machine AND since_s > ? AND node != ?",
        (now_s - _WINDOW_S, node),
    )
    if len(rows.fetchall()) >= most:
        return f"{most} nodes were cordoned within an hour, the most that the machine may cordon"
    _insert(db, Cordon(node, MACHINE, True, reason, now_s, now_s + _EXPIRES_S))
    return None


def lift_by_machine(db: sqlite3.Connection, node: str, *, with_links: bool) -> bool:
    """Lift the machine's own cordon of a node after a check that found nothing; returns whether it did.

    with_links: links were measured, without which a cordon for a link stays.
    """
    cordon = active(db).get(node)
    if cordon is None or not cordon.by_machine or ("link" in cordon.reason and not with_links):
        return False
    return _lift(db, node, MACHINE, by_machine=True) > 0


def _insert(db: sqlite3.Connection, cordon: Cordon) -> None:
    values = (cordon.node, cordon.owner, cordon.by_machine, cordon.reason, cordon.since_s, cordon.until_s)
    db.execute(
        "INSERT INTO fleet_cordons (node, owner, by_machine, reason, since_s, until_s) VALUES (?, ?, ?, ?, ?, ?)",
        values,
    )


def _lift(db: sqlite3.Connection, node: str, owner: str, *, by_machine: bool) -> int:
    now_s = clock.wall_s()
    lifted = db.execute(
        f"UPDATE fleet_cordons SET lifted_s=?, lifted_by=? WHERE node=? AND by_machine=? AND {_ACTIVE}",
        (now_s, owner, node, by_machine, now_s),
    )
    return lifted.rowcount
