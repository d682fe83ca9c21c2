"""The goodput ledger in ``smalti runs show``: as JSON values, and as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base import clock
from smalti.base.units import format_frac, format_seconds
from smalti.cli.tables import table
from smalti.plan.failures.hindsight import hindsight
from smalti.track.goodput import Ledger, ledger, read_history
from smalti.track.report.interruptions import what_happened
from smalti.track.report.read import RunRecord

_NOT_PAID = ("queue", "degraded")
"""Buckets of ranks that the run did not have."""


def goodput_facts(run: RunRecord, *, usd_per_hour: float | None, price_source: str | None) -> dict[str, Any] | None:
    """Return the ledger as JSON values; None before the first attempt. usd_per_hour: price of one rank's device."""
    result = ledger(read_history(Path(run.folder), clock.wall_s()))
    if result is None or not result.total_s:
        return None

    def usd(seconds: float, bucket: str = "") -> dict[str, float]:
        if usd_per_hour is None:
            return {}
        return {"usd": 0.0 if bucket in _NOT_PAID else seconds / 3600 * usd_per_hour}

    helped = hindsight(result, run.events)
    return {
        "wall_s": result.wall_s,
        "total_s": result.total_s,
        "goodput_frac": result.goodput_frac,
        "usd_per_hour": usd_per_hour,
        "price_source": price_source,
        "buckets": {
            name: {"seconds": seconds, "frac": result.frac(name), **usd(seconds, name)}
            for name, seconds in result.seconds.items()
        },
        "interruptions": _interruptions(result),
        "would_have_helped": [
            {"change": each.words, "goodput_frac": each.goodput_frac, "saved_s": each.saved_s, **usd(each.saved_s)}
            for each in (helped.changes if helped else ())
        ],
        "closed_form_goodput_frac": helped.goodput_frac if helped else None,
    }


def _interruptions(result: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "attempt": each.attempt,
            "since_start_s": each.at_s - result.start_s,
            "step": each.step,
            "what": what_happened(each),
            "event": dict(each.event),
            "detect_s": each.detect_s,
            "lost_s": each.lost_s,
            "restart_s": each.restart_s,
            "idle_s": each.idle_s,
            "resumed_step": each.resumed_step,
            "by_itself": each.by_itself,
        }
        for each in result.interruptions
    ]


def goodput_text(facts: Mapping[str, Any] | None) -> str:
    """Return the ledger as text; empty without one."""
    if facts is None:
        return ""
    priced = facts["usd_per_hour"] is not None
    rows = [
        (name.replace("_", " "), format_frac(of["frac"]), format_seconds(of["seconds"]), *_usd(of, priced))
        for name, of in facts["buckets"].items()
        if of["seconds"] > 0
    ]
    total_usd = {"usd": sum(of.get("usd", 0.0) for of in facts["buckets"].values())}
    rows.append(("all", format_frac(1.0), format_seconds(facts["total_s"]), *_usd(total_usd, priced)))
    text = table(("goodput", "share", "rank time", *(["USD"] if priced else [])), rows)
    if priced:
        text += f"\nat {facts['usd_per_hour']:g} USD for an hour of a rank ({facts['price_source']})"
    return "\n\n".join(filter(None, (text, _faults_text(facts), _helped_text(facts, priced))))


def _faults_text(facts: Mapping[str, Any]) -> str:
    rows = [
        (
            format_seconds(each["since_start_s"]),
            str(each["step"]),
            each["what"],
            format_seconds(each["detect_s"]),
            format_seconds(each["lost_s"]),
            format_seconds(each["restart_s"]),
            "-" if each["resumed_step"] is None else str(each["resumed_step"]),
            "itself" if each["by_itself"] else "-" if each["resumed_step"] is None else "a new command",
        )
        for each in facts["interruptions"]
    ]
    head = ("interruption at", "step", "what", "detected in", "lost work", "restart", "from step", "restarted by")
    return table(head, rows) if rows else ""


def _helped_text(facts: Mapping[str, Any], priced: bool) -> str:
    rows = [
        (
            each["change"],
            "-" if each["goodput_frac"] is None else format_frac(each["goodput_frac"]),
            format_seconds(each["saved_s"]),
            *_usd(each, priced),
        )
        for each in facts["would_have_helped"]
    ]
    if not rows:
        return ""
    head = ("what would have helped", "goodput", "rank time saved", *(["USD"] if priced else []))
    before = format_frac(facts["closed_form_goodput_frac"])
    return table(head, rows) + f"\ngoodput: closed form of 'smalti plan failures' by this run's own times; now {before}"


def _usd(facts: Mapping[str, Any], priced: bool) -> list[str]:
    return [f"{facts.get('usd', 0.0):,.2f}"] if priced else []
