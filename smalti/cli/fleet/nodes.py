"""``smalti fleet cordon`` and ``smalti fleet nodes``."""

import getpass
import sys
from typing import Annotated, Any

import typer

from smalti.cli.options import Json

_Node = Annotated[str, typer.Argument(metavar="NODE", help="Host name, as 'smalti fleet nodes' lists it.")]


def cordon(
    node: _Node,
    reason: Annotated[str | None, typer.Option(help="Why; the list of nodes shows it.")] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="It ends after this time: 12h, 2d. Absent: with --off.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Lift the cordons of the node, also the machine's.")] = False,
    as_json: Json = False,
) -> None:
    """Start no run on a node any more; what runs there continues. Your cordon ends with its time or with --off.

    The machine cordons a node whose check found something (train.health, or smalti fleet check --cordon): in any hour
    at most 2 nodes, or 10 % of those known if that is more. Its cordons end after a day, or when a check finds nothing.
    """
    from smalti.base import clock, database
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.fleet.ledger import cordons, records

    _require_name(node)
    if off and (reason is not None or until is not None):
        raise UserError(
            "--off with --reason or --until", allowed="one of them", hint=f"smalti fleet cordon {node} --off"
        )
    if not off and not (reason or "").strip():
        raise UserError(
            "a cordon without --reason", allowed="a reason that others understand",
            hint=f"smalti fleet cordon {node} --reason 'fan replaced on Friday' --until 2d",
        )  # fmt: skip
    with database.transaction() as db:
        known = records.known(db)
        if off:
            cordons.lift_by_person(db, node, owner=getpass.getuser())
        else:
            until_s = None if until is None else clock.wall_s() + _seconds(until)
            cordons.set_by_person(db, node, owner=getpass.getuser(), reason=(reason or "").strip(), until_s=until_s)
        value = next(row for row in records.overview(db) if row["node"] == node)
    if not off and node not in known:
        _say_unknown(node, known)
    print_json(value) if as_json else print(f"{node}: {value['state']}")


def nodes(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Show this one, with its whole ledger.")] = None,
    as_json: Json = False,
) -> None:
    """List the nodes that were checked, cordoned or have run something: state, cordon, last check, faults."""
    from smalti.base import database
    from smalti.base.errors import UserError, nearest
    from smalti.cli.tables import print_json, print_table
    from smalti.fleet.ledger import records

    with database.transaction(write=False) as db:
        listed = records.overview(db)
        if node is not None:
            listed = [row for row in listed if row["node"] == node]
            if not listed:
                close = nearest(node, records.known(db))
                hint = f"did you mean '{close}'?" if close else "smalti fleet nodes"
                raise UserError(
                    f"nothing is known of a node '{node}'", allowed="nodes of 'smalti fleet nodes'", hint=hint
                )
            whole = listed[0] | {"records": records.of_node(db, node), "cordons": records.cordons_of(db, node),
                                 "attempts_here": records.runs_of(db, node)}  # fmt: skip
    if node is not None:
        print_json(whole) if as_json else print(_page(whole))
    elif as_json:
        print_json(listed)
    else:
        head = ("node", "state", "last check", "checks", "faults", "attempts", "runs", "cordon")
        print_table(head, [_row(row) for row in listed], empty="no node is known; smalti fleet check records one")


def warn_if_cordoned() -> None:
    """Print that runs wait because this machine, or every host of their cluster, is cordoned."""
    from smalti.base import database
    from smalti.fleet.ledger import cordons
    from smalti.fleet.queue import runs
    from smalti.fleet.queue.states import WAITING

    host = runs.this_host()
    with database.transaction(write=False) as db:
        cordoned = cordons.active(db)
        waiting = [run for run in runs.unfinished(db, host) if run.state in WAITING] if cordoned else []
    by_hosts: dict[tuple[str, ...], list[str]] = {}
    for run in waiting:
        hosts = {"local": (host,), "ssh": run.hosts.names if run.hosts else (), "slurm": ()}[run.engine]
        if hosts and all(name in cordoned for name in hosts):
            by_hosts.setdefault(hosts, []).append(run.id)
    for hosts, ids in by_hosts.items():
        first = cordoned[hosts[0]]
        text = f"{', '.join(hosts)} is cordoned by {first.owner} ({first.reason}) and starts no run; "
        print(f"{text}{', '.join(ids)} waits: smalti fleet cordon {hosts[0]} --off", file=sys.stderr)


def _require_name(node: str) -> None:
    from smalti.base.errors import UserError

    if not node or len(node) > 253 or not all(letter.isalnum() or letter in "-._" for letter in node):
        raise UserError(
            f"'{node}' is no host name", allowed="letters, digits, '-', '_' and '.'", hint="smalti fleet nodes"
        )


def _seconds(text: str) -> float:
    from pydantic import TypeAdapter, ValidationError

    from smalti.base.errors import UserError
    from smalti.config.durations import to_seconds
    from smalti.config.schema import Period

    try:
        seconds = to_seconds(TypeAdapter(Period).validate_python(text))
    except ValidationError as error:
        raise UserError(f"--until {text} is no time from now", allowed="30min, 12h, 2d", hint="--until 2d") from error
    assert seconds is not None
    return seconds


def _say_unknown(node: str, known: list[str]) -> None:
    from smalti.base.errors import nearest

    close = nearest(node, known)
    close_text = f"; did you mean '{close}'?" if close else ""
    typer.echo(f"{node} has no record here yet{close_text}", err=True)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    last, cordoned = row["last_check"], row["cordon"]
    check = "" if last is None else f"{last['result']}, {_ago(last['time_s'])}"
    counts = (str(row[name]) for name in ("checks", "faults", "attempts"))
    return (
        row["node"],
        row["state"],
        check,
        *counts,
        ", ".join(row["runs"]),
        "" if cordoned is None else _why(cordoned),
    )


def _why(cordoned: dict[str, Any]) -> str:
    from smalti.base import clock
    from smalti.base.units import format_seconds

    left = "" if cordoned["until_s"] is None else f", {format_seconds(cordoned['until_s'] - clock.wall_s())} left"
    return f"{cordoned['owner']}: {cordoned['reason']}{left}"


def _ago(time_s: float) -> str:
    from smalti.base import clock
    from smalti.base.units import format_seconds

    return f"{format_seconds(max(0.0, clock.wall_s() - time_s))} ago"


def _page(whole: dict[str, Any]) -> str:
    from smalti.cli.tables import pairs, table

    lines = [("node", whole["node"]), ("state", whole["state"])]
    lines += [("cordon", _why(whole["cordon"]))] if whole["cordon"] else []
    lines += [("runs now", ", ".join(whole["runs"]) or "none")]
    parts = [pairs(lines)]
    if whole["records"]:
        rows = [(_ago(row["time_s"]), row["kind"], row["result"], row["message"]) for row in whole["records"]]
        parts.append(table(("when", "kind", "result", "message"), rows))
    if whole["cordons"]:
        ended = [
            (_ago(row["since_s"]), row["owner"], row["reason"], row["lifted_by"] or "") for row in whole["cordons"]
        ]
        parts.append(table(("cordoned", "by", "reason", "lifted by"), ended))
    if whole["attempts_here"]:
        ran = [
            (row["run"], str(row["attempt"]), _ago(row["started_s"]), "" if row["code"] is None else str(row["code"]))
            for row in whole["attempts_here"]
        ]
        parts.append(table(("run", "attempt", "started", "exit code"), ran))
    return "\n\n".join(parts)
