"""What ``smalti fleet`` prints of a run: rows, details and JSON."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from smalti.cli.tables import pairs, table
from smalti.fleet.queue.runs import Attempt, Run
from smalti.track.run import RunFolder

HEAD = ("id", "state", "cause", "priority", "needs", "step", "attempts", "ran", "folder")


def to_json(run: Run, attempts: list[Attempt], needs: list[str]) -> dict[str, Any]:
    """Return a run as JSON values."""
    return {
        "id": run.id,
        "name": run.name,
        "state": run.state,
        "cause": run.cause,
        "code": run.code,
        "cluster": run.cluster,
        "host": run.host,
        "priority": run.priority,
        "preemptible": run.preemptible,
        "max_duration_s": run.max_duration_s,
        "retries": run.retries,
        "retries_by_cause": run.retries_by_cause,
        "depends_on": needs,
        "cores": run.cores,
        "gpus": run.gpus,
        "folder": run.folder,
        "directory": run.directory,
        "code_commit": run.code_commit,
        "secrets": list(run.secrets),
        "time": run.time,
        "step": _step(run),
        "run_s": _ran_s(attempts),
        "attempts": [
            {
                "number": attempt.number,
                "gpus": list(attempt.gpus),
                "node": attempt.node,
                "pid": attempt.pid,
                "started_s": attempt.started_s,
                "ended_s": attempt.ended_s,
                "run_s": attempt.duration_s(),
                "code": attempt.code,
                "reason": attempt.reason,
            }
            for attempt in attempts
        ],
    }


def row(value: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of ``ls`` from a run's JSON."""
    return (
        value["id"],
        value["state"],
        value["cause"] or "",
        str(value["priority"]),
        _need(value),
        "" if value["step"] is None else f"{value['step']:,}",
        str(len(value["attempts"])),
        _clock(value["run_s"]),
        _short(value["folder"]),
    )


def about(value: dict[str, Any]) -> str:
    """Return the page of a run from its JSON."""
    cause = f" ({value['cause']})" if value["cause"] else ""
    limit = "none" if value["max_duration_s"] is None else _clock(value["max_duration_s"])
    lines = [
        ("id", value["id"]),
        ("state", value["state"] + cause),
        ("exit code", "" if value["code"] is None else str(value["code"])),
        ("step", "" if value["step"] is None else f"{value['step']:,}"),
        ("priority", f"{value['priority']}{', preemptible' if value['preemptible'] else ''}"),
        ("needs", _need(value)),
        ("max duration", limit),
        ("secrets", ", ".join(value["secrets"])),
        ("depends on", ", ".join(value["depends_on"])),
        ("folder", value["folder"] or ""),
        ("directory", value["directory"]),
        ("commit", value["code_commit"] or "of an installed version"),
        ("machine", value["host"]),
        ("launched", value["time"]),
    ]
    text = pairs([(name, shown) for name, shown in lines if shown])
    attempts = [
        (
            str(each["number"]),
            each["node"] or "",
            _attempt_state(each),
            _clock(each["run_s"]),
            each["reason"] or "",
        )
        for each in value["attempts"]
    ]
    text += "\n\n" + table(("attempt", "node", "end", "ran", "reason"), attempts) if attempts else ""
    members = [
        (
            each["id"],
            each["state"],
            each["attempts"][-1]["node"] if each["attempts"] else "",
            str(len(each["attempts"])),
        )
        for each in value.get("members", [])
    ]
    return text + ("\n\n" + table(("member", "state", "node", "attempts"), members) if members else "")


def event_row(event: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of ``events``."""
    attempt = "" if event["attempt"] is None else str(event["attempt"])
    return (event["time"], event["state"], event["cause"] or "", event["source"], attempt, event["detail"] or "")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _step(run: Run) -> int | None:
    if run.folder is None or not Path(run.folder).is_dir():
        return None
    step = RunFolder(run.folder).status().get("step")
    return step if isinstance(step, int) else None


def _ran_s(attempts: list[Attempt]) -> float:
    return sum(attempt.duration_s() for attempt in attempts)


def _attempt_state(attempt: dict[str, Any]) -> str:
    if attempt["ended_s"] is None:
        return "" if attempt["started_s"] is None else "running"
    return "unknown" if attempt["code"] is None else f"code {attempt['code']}"


def _need(value: dict[str, Any]) -> str:
    count, unit = (value["gpus"], "GPU") if value["gpus"] else (value["cores"], "core")
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _short(folder: str | None) -> str:
    if folder is None:
        return ""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder
