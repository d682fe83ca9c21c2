"""Interruptions of a run in words: what happened, how it was detected, what was done."""

from smalti.base.units import format_seconds
from smalti.track.goodput import Interruption

_WHAT = {
    "rank_hung": "hung",
    "rank_unresponsive": "did not respond",
    "oom": "ran out of memory",
}


def what_happened(fault: Interruption) -> str:
    """Return ``rank 1 was killed by SIGKILL in forward``."""
    event = fault.event
    kind = str(event.get("event", ""))
    if kind == "not_finite":
        return f"the {event.get('cause')} was {event.get('value')}"
    if kind == "node_lost":
        return f"node {event['node']} was lost: {event['why']}"
    if event.get("rank") is None:
        return str(event["reason"]) if event.get("reason") else "the command was killed"
    where = f" in {event['phase']}" if event.get("phase") else ""
    if event.get("signal"):
        what = f"was killed by {event['signal']}"
    elif kind == "rank_died":
        what = f"exited with code {event['code']}" if event.get("code") is not None else "died"
    else:
        what = _WHAT.get(kind, kind)
    return f"rank {event['rank']} {what}{where}"


def how_detected(fault: Interruption) -> str:
    """Return ``detected in 50ms``."""
    if not fault.event:
        return "nothing was left that could detect it"
    return f"detected in {format_seconds(fault.detect_s)}"


def what_was_done(fault: Interruption) -> str:
    """Return ``restarted by itself from step 40, ready in 6.2s; 1.3s of work lost``."""
    if fault.resumed_step is None:
        return "not resumed yet"
    who = "restarted by itself" if fault.by_itself else f"a new command after {format_seconds(fault.idle_s)}"
    ready = f"ready in {format_seconds(fault.restart_s)}"
    return f"{who}, from step {fault.resumed_step}, {ready}; {format_seconds(fault.lost_s)} of work lost"
