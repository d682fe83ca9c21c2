"""What a user changes in the queue; each is one transaction, whether or not a controller runs."""

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from smalti.base import clock, database
from smalti.base.errors import UserError
from smalti.config.clusters import Engine
from smalti.config.durations import to_seconds
from smalti.config.launch import LaunchConfig
from smalti.fleet.launch.code import Code
from smalti.fleet.queue import secret_values
from smalti.fleet.queue.runs import Hosts, Run, get, members_of, move, select, this_host, write_event
from smalti.fleet.queue.schedule import Room
from smalti.fleet.queue.states import ENDED, WAITING

_PEER_KEY = "SMALTI_PEER_KEY"


def add(
    name: str,
    command: Sequence[str],
    launch: LaunchConfig,
    need: Room,
    *,
    directory: str,
    folder: str | None = None,
    recipe: str | None = None,
    code: Code | None = None,
    cluster: str = "local",
    engine: Engine = "local",
    hosts: Hosts | None = None,
    members: int = 0,
    member_command: Sequence[str] = (),
) -> Run:
    """Append a run to the queue, and return it. need: of each of its hosts.

    members: other hosts that it needs; on each ``member_command`` runs, in a run of its own. All of them get a random
    ``SMALTI_PEER_KEY``, unless that is one of the secrets.

    Raises UserError where another run that has not ended uses the folder, a dependency does not exist or has failed, or
    a secret has no value.
    """
    key = {_PEER_KEY: secrets.token_hex(32)} if members and _PEER_KEY not in launch.secrets else {}
    with database.transaction() as db:
        ids = dict.fromkeys(launch.depends_on)
        needs = [get(db, reference) for reference in ids]
        for each in needs:
            if each.is_ended and each.state != "COMPLETED":
                raise UserError(
                    f"launch.depends_on: {each.id} is {each.state}",
                    allowed="runs that are completed, or can be",
                    hint=f"smalti fleet resume {each.id}",
                )
        if folder is not None:
            _require_free(folder, select(db, "folder=?", (folder,)))
        values = {
            **{"name": name, "cluster": cluster, "engine": engine, "host": this_host()},
            **_columns(launch, need, command),
            "recipe": recipe,
            "directory": directory,
            "folder": folder,
            "code_commit": None if code is None else code.commit,
            "packed": None if code is None or code.folder is None else str(code.folder),
            "secrets": json.dumps([*launch.secrets, *key]),
            "hosts": None if hosts is None else json.dumps(asdict(hosts)),
        }
        number = _insert(db, values)
        secret_values.keep(number, launch.secrets, key)
        db.executemany("INSERT INTO fleet_dependencies VALUES (?, ?)", [(number, each.number) for each in needs])
        values |= {"name": f"{name}-node", "command": json.dumps(list(member_command)), "member_of": number}
        for _ in range(members):
            _insert(db, values | {"recipe": None, "folder": None, "max_duration_s": None})
        return select(db, "number=?", (number,))[0]


def _columns(launch: LaunchConfig, need: Room, command: Sequence[str]) -> dict[str, Any]:
    return {
        "state": "PENDING",
        "priority": launch.level,
        "preemptible": launch.preemptible,
        "max_duration_s": _seconds(launch),
        "retries": launch.retries,
        "retries_by_cause": json.dumps(launch.retries_by_cause),
        "cores": need.cores,
        "gpus": need.gpus,
        "command": json.dumps(list(command)),
        "retried": "{}",
        "not_before_s": 0.0,
        "time": clock.utc_text(),
    }


def _insert(db: sqlite3.Connection, values: Mapping[str, Any]) -> int:
    """Insert a run with its first event, and return its number."""
    columns, marks = ", ".join(values), ", ".join(f":{column}" for column in values)
    number = db.execute(f"INSERT INTO fleet_runs ({columns}) VALUES ({marks})", values).lastrowid
    assert number is not None
    write_event(db, number, "PENDING", cause="launched", source="user")
    return number


def stop(reference: str) -> Run:
    """Ask for the end of a run, and return it: STOPPED at once if it waits, else TERMINATING until it has saved.

    A run that has ended stays as it is. Members of a run end with it.
    """
    with database.transaction() as db:
        run = _lead(db, reference)
        if run.is_ended or (run.state == "TERMINATING" and run.cause == "user"):
            return run
        moved = move(db, run, "STOPPED" if run.state in WAITING else "TERMINATING", cause="user", source="user")
        assert moved, "the row is locked"
        return get(db, reference)


def resume(reference: str) -> Run:
    """Queue a run again that has failed or was stopped; it continues from its newest checkpoint."""
    with database.transaction() as db:
        run = _lead(db, reference)
        if run.state not in ENDED or run.state == "COMPLETED":
            raise UserError(
                f"{run.id} is {run.state}",
                allowed="runs that are FAILED or STOPPED",
                hint=f"smalti fleet clone {run.id} name=NEW_NAME" if run.is_ended else f"smalti fleet wait {run.id}",
            )
        if run.folder is not None:
            _require_free(run.folder, select(db, "folder=?", (run.folder,)))
        new: dict[str, Any] = {"code": None, "retried": "{}", "not_before_s": 0.0}
        for each in (run, *members_of(db, run.number)):
            if each.is_ended:
                moved = move(db, each, "PENDING", cause="resumed", source="user", **new)
                assert moved, "the row is locked"
        return get(db, reference)


def update(reference: str, launch: LaunchConfig) -> Run:
    """Change priority, preemptible, max_duration and retries of a run that has not ended to those of ``launch``."""
    with database.transaction() as db:
        run = _lead(db, reference)
        if run.is_ended:
            raise UserError(f"{run.id} is {run.state}", allowed="runs that have not ended", hint="smalti fleet ls")
        after = replace(
            run,
            priority=launch.level,
            preemptible=launch.preemptible,
            max_duration_s=_seconds(launch),
            retries=launch.retries,
            retries_by_cause={str(cause): count for cause, count in launch.retries_by_cause.items()},
        )
        db.execute(
            "UPDATE fleet_runs SET priority=?, preemptible=?, max_duration_s=?, retries=?, retries_by_cause=? "
            "WHERE number=?",
            (after.priority, after.preemptible, after.max_duration_s, after.retries,
             json.dumps(after.retries_by_cause), run.number),
        )  # fmt: skip
        db.execute(
            "UPDATE fleet_runs SET priority=?, preemptible=? WHERE member_of=?",
            (after.priority, after.preemptible, run.number),
        )
        detail = f"priority={after.priority} preemptible={after.preemptible} max_duration_s={after.max_duration_s}"
        write_event(db, run.number, run.state, cause="updated", source="user", detail=detail)
        return after


def _lead(db: sqlite3.Connection, reference: str) -> Run:
    """Return the run with this id. Raises UserError for a member of another one, which changes with that."""
    run = get(db, reference)
    if run.member_of is not None:
        lead = get(db, str(run.member_of))
        raise UserError(
            f"{run.id} is a host of {lead.id}, and is stopped, resumed and updated with it",
            allowed=f"{lead.id}; or 'smalti fleet cordon HOST', which starts nothing on that host any more",
            hint=f"smalti fleet show {lead.id}",
        )
    return run


def _require_free(folder: str, runs: list[Run]) -> None:
    other = next((run for run in runs if not run.is_ended), None)
    if other is not None:
        raise UserError(
            f"{other.id}, which is {other.state}, trains in {folder}",
            allowed="one run for each run folder",
            hint=f"name=NEW_NAME, or smalti fleet stop {other.id}",
        )


def _seconds(launch: LaunchConfig) -> float | None:
    return None if launch.max_duration is None else to_seconds(launch.max_duration)
