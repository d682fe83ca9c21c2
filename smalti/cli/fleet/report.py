"""``smalti fleet report``, as JSON values and as text."""

from dataclasses import asdict
from typing import Any

from smalti.base.units import format_frac, format_seconds
from smalti.cli.tables import pairs, table
from smalti.fleet.report import FleetReport


def to_json(report: FleetReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    names = ("scheduling_frac", "mtbf_s", "device_mtbf_s", "lost_s", "lost_device_s")
    return asdict(report) | {name: getattr(report, name) for name in names}


def text(report: FleetReport) -> str:
    """Return a report as text."""
    if not report.states:
        return "no run was launched; smalti fleet launch RECIPE launches one"
    frac, mtbf_s, device_mtbf_s = report.scheduling_frac, report.mtbf_s, report.device_mtbf_s
    lost = f"{format_seconds(report.lost_s)}; times cores or GPUs: {format_seconds(report.lost_device_s)}"
    money = f"${report.usd or 0:,.2f}; lost to faults: ${report.lost_usd or 0:,.2f}"
    head = pairs(
        [
            ("runs", ", ".join(f"{count} {state}" for state, count in report.states.items())),
            ("ran", f"{format_seconds(report.ran_s)}; times cores or GPUs: {format_seconds(report.device_s)}"),
            ("waited for room", format_seconds(report.waited_s)),
            ("scheduling goodput", "-" if frac is None else format_frac(frac)),
            ("mean time between faults", "no fault" if mtbf_s is None else format_seconds(mtbf_s)),
            ("core or GPU time per fault", "no fault" if device_mtbf_s is None else format_seconds(device_mtbf_s)),
            ("lost to faults", lost),
            *([] if report.usd is None else [("cost", money)]),
        ]
    )
    parts = [head]
    if report.faults:
        rows = [
            (fault.cause, str(fault.count), format_seconds(fault.lost_s), format_seconds(fault.restart_s))
            for fault in report.faults
        ]
        parts.append(table(("fault", "count", "work lost", "until it trained again"), rows))
    if report.ends:
        ends = [(cause, str(count)) for cause, count in report.ends.items()]
        parts.append(table(("attempts ended by", "count"), ends))
    return "\n\n".join(parts)
