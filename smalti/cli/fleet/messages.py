"""``smalti fleet messages``."""

from typing import Annotated, Any

import typer

from smalti.cli.options import Json


def messages(
    test: Annotated[
        bool, typer.Option("--test", help="Send a test to each receiver of fleet.yaml; exits with 3 if one refuses it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the incidents, oldest first: what happened to which node or run, what was done, who got the message.

    Receivers are in fleet.yaml of SMALTI_HOME: webhooks, and mail. Each gets one message for an incident.
    """
    from smalti.base import database
    from smalti.cli.tables import print_json, print_table
    from smalti.fleet.messages import incidents, outbox

    if test:
        _test(as_json)
        return
    with database.transaction(write=False) as db:
        sent = outbox.messages(db)
        listed = [row | {"messages": sent.get(row["number"], [])} for row in incidents.read(db)]
    if as_json:
        print_json(listed)
        return
    head = ("when", "priority", "what", "node", "run", "reason", "action", "messages")
    print_table(head, [_row(row) for row in listed], empty="no incident")


def _test(as_json: bool) -> None:
    from smalti.base.errors import CheckFailed, UserError
    from smalti.cli.tables import print_json
    from smalti.fleet.messages.outbox import send_test

    results = send_test()
    if not results:
        raise UserError("fleet.yaml has no receivers", allowed="messages: {NAME: {url: SECRET}}",
                        hint="docs/guides/launch.md shows such a file")  # fmt: skip
    if as_json:
        print_json(results)
    else:
        print("\n".join(f"{name}: {error or 'accepted'}" for name, error in results.items()))
    refused = [name for name, error in results.items() if error is not None]
    if refused:
        raise CheckFailed(
            f"the message to {', '.join(refused)} was not accepted", hint="see fleet.yaml, and the secret"
        )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    from smalti.base import clock
    from smalti.base.units import format_seconds

    when = f"{format_seconds(max(0.0, clock.wall_s() - row['time_s']))} ago"
    states = ", ".join(f"{message['target']} {_state(message)}" for message in row["messages"])
    return (
        when,
        row["priority"],
        row["type"],
        row["node"] or "",
        row["run"] or "",
        row["reason"],
        row["action"],
        states,
    )


def _state(message: dict[str, Any]) -> str:
    if message["sent_s"] is not None:
        return "sent"
    return "given up" if message["given_up_s"] is not None else f"waits ({message['error'] or 'not tried yet'})"
