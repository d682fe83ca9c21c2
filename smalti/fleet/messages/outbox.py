"""Sends the messages of the outbox, until each receiver has accepted or a day has passed.

A message is claimed before it is sent, and recorded as sent once the receiver has answered. A process that is killed
before the answer has sent nothing that counts: the message is sent again. If it is killed between the answer and the
record, the receiver gets it twice, with the same ``id`` (header ``Idempotency-Key``, ``Message-ID`` of a mail).
"""

import http.client
import json
import math
import os
import smtplib
import sqlite3
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from smalti.base import clock, database
from smalti.base.errors import SmaltiError, UserError
from smalti.base.log import get
from smalti.base.processes import identity, is_running
from smalti.config.fleet import EmailConfig, TargetConfig
from smalti.fleet.messages import text
from smalti.fleet.messages.incidents import fleet_config
from smalti.fleet.queue import runs, secret_values

_TIMEOUT_S = 10.0
_FIRST_WAIT_S, _MOST_WAIT_S = 2.0, 300.0
_GIVE_UP_S = 86400.0
_POLL_S, _ERROR_WAIT_S, _FINISH_S = 1.0, 30.0, 60.0

_DUE = (
    "SELECT fleet_incidents.*, fleet_outbox.* FROM fleet_outbox "
    "JOIN fleet_incidents ON fleet_incidents.number=incident "
    "WHERE sent_s IS NULL AND given_up_s IS NULL AND due_s <= ? ORDER BY due_s, incident"
)

Json = dict[str, Any]


class Sender(threading.Thread):
    """Sends messages in the background until ``finish``."""

    def __init__(self) -> None:
        super().__init__(name="messages", daemon=True)
        self._ends = threading.Event()

    def run(self) -> None:
        """Send what is due, and look again after a second."""
        wait_s = _POLL_S
        while not self._ends.wait(wait_s):
            wait_s = _POLL_S if deliver() is not None else _ERROR_WAIT_S

    def finish(self) -> None:
        """Send until nothing waits, at most a minute; what is left is sent by the next controller."""
        self._ends.set()
        if self.is_alive():
            self.join(2 * _TIMEOUT_S)
        end_s = clock.now_s() + _FINISH_S
        while deliver() is not None and _is_due(math.inf) and clock.now_s() < end_s:
            time.sleep(_POLL_S / 2)


def deliver() -> int | None:
    """Send every message that is due, once; returns how many were accepted, None after an error of ours."""
    accepted, before_s = 0, clock.wall_s()
    try:
        if not _is_due(before_s):
            return 0
        config = fleet_config().messages
        while (row := _claim(before_s)) is not None:
            error = _try(config.get(row["target"]), row)
            _record(row, error)
            accepted += error is None
            if error is not None:
                get("fleet").warning("the message %s to %s: %s", text.identifier(row), row["target"], error)
    except SmaltiError as error:
        get("fleet").error("messages wait: %s", error)
        return None
    return accepted


def messages(db: sqlite3.Connection) -> dict[int, list[Json]]:
    """Return by number of the incident what became of its messages: when sent or given up, tries, the last error."""
    grouped: dict[int, list[Json]] = {}
    rows = db.execute("SELECT incident, target, tries, sent_s, given_up_s, error FROM fleet_outbox ORDER BY target")
    for row in map(dict, rows):
        grouped.setdefault(row.pop("incident"), []).append(row)
    return grouped


def send_test() -> dict[str, str | None]:
    """Send a message to each receiver now, without the outbox; returns by name why it was not accepted, None if it
    was."""
    row = {
        "number": 0, "time_s": clock.wall_s(), "priority": "normal", "type": "test", "node": runs.this_host(),
        "cluster": None, "run": None, "reason": "test", "message": "this is a test", "action": "none",
    }  # fmt: skip
    return {name: _try(target, row) for name, target in fleet_config().messages.items()}


def _is_due(before_s: float) -> bool:
    with database.transaction(write=False) as db:
        return db.execute(_DUE, (before_s,)).fetchone() is not None


def _claim(before_s: float) -> Json | None:
    """Make this process the one that sends the message that was due first; None: none was, or others send them."""
    pid = os.getpid()
    with database.transaction() as db:
        for row in db.execute(_DUE, (before_s,)).fetchall():
            if row["pid"] is None or not is_running(row["pid"], row["process"]):
                db.execute(
                    "UPDATE fleet_outbox SET pid=?, process=? WHERE incident=? AND target=?",
                    (pid, identity(pid), row["incident"], row["target"]),
                )
                return dict(row)
    return None


def _record(row: Json, error: str | None) -> None:
    now_s, tries = clock.wall_s(), row["tries"] + 1
    wait_s = min(_MOST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(row["tries"], 20))
    gives_up = error is not None and now_s > row["time_s"] + _GIVE_UP_S
    with database.transaction() as db:
        db.execute(
            "UPDATE fleet_outbox SET pid=NULL, process=NULL, tries=?, due_s=?, sent_s=?, given_up_s=?, error=? "
            "WHERE incident=? AND target=?",
            (tries, now_s + wait_s, now_s if error is None else None, now_s if gives_up else None, error,
             row["incident"], row["target"]),
        )  # fmt: skip


def _try(target: TargetConfig | None, row: Json) -> str | None:
    """Send a message; returns why it was not accepted. No error has the URL, which is a secret."""
    if target is None:
        return "fleet.yaml has no receiver of this name any more"
    try:
        if target.email is not None:
            _mail(target.email, row)
        else:
            assert target.url is not None
            _post(secret_values.value(target.url).strip(), target.format, row)
    except urllib.error.HTTPError as error:
        return f"the server answered {error.code}"
    except urllib.error.URLError as error:
        return f"the server cannot be reached: {error.reason}"
    except smtplib.SMTPResponseException as error:
        return f"the mail server answered {error.smtp_code}"
    except SmaltiError as error:
        return error.message
    except (OSError, http.client.HTTPException, smtplib.SMTPException, ValueError) as error:
        return type(error).__name__
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: it would turn POST into GET, and send the message elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def _post(url: str, form: str, row: Json) -> None:
    if not url.startswith(("http://", "https://")):
        raise UserError("the value of the secret is no URL", allowed="https://... or http://...")
    body = text.slack(row) if form == "slack" else text.to_json(row)
    headers = {"Content-Type": "application/json", "Idempotency-Key": text.identifier(row), "User-Agent": "smalti"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S) as answer:
        answer.read(1)


def _mail(config: EmailConfig, row: Json) -> None:
    context = ssl.create_default_context()
    if config.encryption == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(config.host, config.port, timeout=_TIMEOUT_S, context=context)
    else:
        server = smtplib.SMTP(config.host, config.port, timeout=_TIMEOUT_S)
    with server:
        if config.encryption == "starttls":
            server.starttls(context=context)
        if config.user is not None and config.password is not None:
            server.login(config.user, secret_values.value(config.password))
        server.send_message(text.mail(row, config))
