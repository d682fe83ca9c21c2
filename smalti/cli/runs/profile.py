"""The tables of ``smalti runs profile``: where the time of a window of steps went, and the collectives."""

from smalti.base.units import format_bytes, format_seconds
from smalti.cli.tables import table
from smalti.track.profiles import Summary


def profile_text(summary: Summary) -> str:
    """Return the summary of one rank's window as tables."""
    bottleneck = summary.bottleneck
    lines = [
        f"steps {summary.first_step} to {summary.last_step}, rank {summary.rank} on {summary.device}: "
        f"{format_seconds(summary.window_s / summary.steps)} per step while profiled",
        f"bottleneck: {bottleneck.name}, {bottleneck.s / summary.window_s:.0%} of the time; "
        f"removing it would make a step at most {summary.gain(bottleneck):.2f} times as fast",
        "",
        table(
            ["part", "per step", "share", "gain without", "calls"],
            [
                [part.name, format_seconds(part.s / summary.steps), f"{part.s / summary.window_s:.1%}",
                 f"{summary.gain(part):.2f} x", f"{part.calls / summary.steps:,.0f}" if part.calls else ""]
                for part in summary.parts
            ],
        ),
        "",
        table(
            ["slowest operators", "per step", "calls"],
            [[row.name, format_seconds(row.s / summary.steps), f"{row.calls / summary.steps:,.0f}"]
             for row in summary.operators[:8]],
        ),
    ]  # fmt: skip
    if summary.traffic:
        rows = [
            [row.op, row.axis, f"{row.calls / summary.steps:,.0f}", format_bytes(row.bytes / summary.steps),
             "" if row.s is None else format_seconds(row.s / summary.steps),
             "none" if row.planned_calls is None else f"{row.planned_calls / summary.steps:,.0f}",
             "" if row.planned_bytes is None else format_bytes(row.planned_bytes / summary.steps)]
            for row in summary.traffic
        ]  # fmt: skip
        lines += [
            "",
            table(["collective", "axis", "calls", "bytes per step", "in flight", "planned", "bytes planned"], rows),
        ]
    if summary.peak_bytes is not None:
        lines.append(f"\npeak memory of the device's allocator: {format_bytes(summary.peak_bytes)}")
    return "\n".join(lines)
