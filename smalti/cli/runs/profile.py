"""What ``smalti runs profile`` prints: where the time of a window of steps went, and what was sent."""

from smalti.base.units import format_bytes, format_seconds
from smalti.cli.tables import table
from smalti.track.profiles import Summary


def profile_text(found: Summary) -> str:
    """The summary of one rank's window, for people."""
    named = found.bottleneck
    lines = [
        f"steps {found.first_step} to {found.last_step}, rank {found.rank} on {found.device}: "
        f"{format_seconds(found.window_s / found.steps)} a step while profiled",
        f"bottleneck: {named.name}, {named.s / found.window_s:.0%} of the time; "
        f"without it a step would be {found.gain(named):.2f} times as fast at most",
        "",
        table(
            ["part", "a step", "share", "without it", "calls"],
            [
                [part.name, format_seconds(part.s / found.steps), f"{part.s / found.window_s:.1%}",
                 f"{found.gain(part):.2f} x", f"{part.calls / found.steps:,.0f}" if part.calls else ""]
                for part in found.parts
            ],
        ),
        "",
        table(
            ["slowest operators", "a step", "calls"],
            [[one.name, format_seconds(one.s / found.steps), f"{one.calls / found.steps:,.0f}"]
             for one in found.operators[:8]],
        ),
    ]  # fmt: skip
    if found.traffic:
        rows = [
            [one.op, one.axis, f"{one.calls / found.steps:,.0f}", format_bytes(one.bytes / found.steps),
             "" if one.s is None else format_seconds(one.s / found.steps),
             "none" if one.planned_calls is None else f"{one.planned_calls / found.steps:,.0f}",
             "" if one.planned_bytes is None else format_bytes(one.planned_bytes / found.steps)]
            for one in found.traffic
        ]  # fmt: skip
        lines += [
            "",
            table(["collective", "axis", "calls", "bytes a step", "in flight", "planned", "bytes planned"], rows),
        ]
    if found.peak_bytes is not None:
        lines.append(f"\npeak of the device's allocator: {format_bytes(found.peak_bytes)}")
    return "\n".join(lines)
