"""An incident as JSON, as text for Slack, and as a mail."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any

from smalti.config.fleet import EmailConfig


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an incident as a receiver gets it. ``id`` is the same in a message that is sent again."""
    names = ("priority", "type", "node", "cluster", "run", "reason", "message", "action")
    time = datetime.fromtimestamp(row["time_s"], UTC).isoformat(timespec="seconds")
    return {"id": identifier(row), "time": time, **{name: row[name] for name in names}, "text": plain(row)}


def identifier(row: Mapping[str, Any]) -> str:
    """Return what identifies a message for its receiver."""
    return f"smalti-{row['number']}-{int(row['time_s'] * 1000)}"


def title(row: Mapping[str, Any]) -> str:
    """Return the subject: what happened, and where."""
    on = " on cluster " + row["cluster"] if row["cluster"] else ""
    where = f"node {row['node']}{on}" if row["node"] else f"run {row['run']}{on}"
    return f"{row['type'].capitalize()}: {where}"


def plain(row: Mapping[str, Any]) -> str:
    """Return the text of a mail."""
    return "\n".join([title(row), "", *(f"{name}: {value}" for name, value in _fields(row))])


def slack(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for Slack."""
    lines = [f"*{_escaped(title(row))}*", *(f"*{name}*: {_escaped(value)}" for name, value in _fields(row))]
    return {"text": "\n".join(lines)}


def mail(row: Mapping[str, Any], config: EmailConfig) -> EmailMessage:
    """Return a mail."""
    message = EmailMessage()
    message["Subject"] = f"[smalti] {row['priority'].capitalize()}: {title(row)}"
    message["From"], message["To"] = config.sender, ", ".join(config.to)
    message["Message-ID"] = f"<{identifier(row)}@smalti>"
    message.set_content(plain(row) + "\n")
    return message


def _fields(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    fields = [
        ("Priority", row["priority"].capitalize()), ("Run", row["run"]), ("Reason", row["reason"]),
        ("Message", row["message"]), ("Action taken", row["action"]),
    ]  # fmt: skip
    return [(name, value) for name, value in fields if value]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
