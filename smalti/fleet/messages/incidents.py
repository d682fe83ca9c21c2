"""Incidents: what happened to which node or run, why, and what was done. Each is recorded once, by its source."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import clock
from smalti.base.env import user_folder
from smalti.base.errors import DataError, SmaltiError
from smalti.base.log import get
from smalti.config.fleet import PRIORITIES, FleetConfig, Priority
from smalti.config.load import load_text


@dataclass(frozen=True)
class Incident:
    """An incident, in the fields of its message."""

    source: str
    """What no other incident has: a run and its attempt, or a check and its node."""
    priority: Priority
    type: str
    """What has happened, in two or three words: ``node cordoned``."""
    reason: str
    """The cause, in a word."""
    message: str
    """What was seen."""
    action: str
    """What the machine has done."""
    node: str | None = None
    cluster: str | None = None
    run: str | None = None


def fleet_config() -> FleetConfig:
    """Return ``fleet.yaml`` of ``SMALTI_HOME``; an empty one where it does not exist."""
    path = Path(user_folder()) / "fleet.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return FleetConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="docs/guides/launch.md shows such a file") from error
    return load_text(FleetConfig, text, str(path)).config


def add(db: sqlite3.Connection, incident: Incident) -> bool:
    """Record an incident with a message for each receiver; returns False where it was recorded before."""
    now_s, fields = clock.wall_s(), Incident.__dataclass_fields__
    columns = {"time_s": now_s, **{name: getattr(incident, name) for name in fields}}
    done = db.execute(
        f"INSERT OR IGNORE INTO fleet_incidents ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
        tuple(columns.values()),
    )
    if done.rowcount == 0:
        return False
    level = PRIORITIES.index(incident.priority)
    for name, target in _targets().items():
        if level >= PRIORITIES.index(target.at_least):
            db.execute(
                "INSERT INTO fleet_outbox (incident, target, due_s) VALUES (?, ?, ?)", (done.lastrowid, name, now_s)
            )
    return True


def read(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return all incidents, oldest first."""
    return [dict(row) for row in db.execute("SELECT * FROM fleet_incidents ORDER BY number")]


def _targets() -> dict[str, Any]:
    try:
        return fleet_config().messages
    except SmaltiError as error:  # the incident is recorded all the same
        get("fleet").error("an incident has no message: %s", error)
        return {}
