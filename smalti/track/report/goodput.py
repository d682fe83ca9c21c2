"""The goodput section of the report: loss and MFU over wall time with the interruptions, and the ledger."""

from html import escape

from smalti.base.chart import Arrow, Panel, Series, timeline
from smalti.base.clock import seconds_of, wall_s
from smalti.base.units import format_count, format_frac, format_seconds
from smalti.track.goodput import BUCKETS, Interruption, Ledger, ledger, read_history
from smalti.track.report.html import row, table, wide_and_narrow
from smalti.track.report.interruptions import how_detected, what_happened, what_was_done
from smalti.track.report.read import RunRecord, smooth
from smalti.track.stragglers import notes as stragglers

_ARROWS = 40
"""Most interruptions in the plot: the last ones."""
_COLUMNS = (("bucket", "k v"), ("share", "n"), ("rank time", "n"), ("what is counted", "soft"))
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_MFU, _SPEED = "throughput/device/mfu", "throughput/tokens_per_sec"


def goodput_section(run: RunRecord) -> str:
    """Return the section; empty before the first attempt."""
    result = ledger(read_history(run.folder, wall_s()))
    if result is None or not result.total_s:
        return ""
    chart = wide_and_narrow(interruptions_chart(run, result, width=1040), interruptions_chart(run, result, width=360))
    rows = "".join(
        row(_COLUMNS, (name.replace("_", " "), format_frac(result.frac(name)), format_seconds(seconds), BUCKETS[name]))
        for name, seconds in result.seconds.items()
        if seconds > 0
    )
    note = (
        f"{format_frac(result.goodput_frac)} of {format_seconds(result.total_s)} of rank time in "
        f"{format_seconds(result.wall_s)} were steps that are part of the run."
    )
    slow = "".join(f'<p class="note bad">{escape(words)}</p>' for words in stragglers(run.events))
    return f'<h2>Goodput</h2><p class="note">{escape(note)}</p>{slow}<figure>{chart}</figure>' + table(_COLUMNS, rows)


def interruptions_chart(run: RunRecord, result: Ledger, *, width: int) -> str:
    """Return loss and MFU (else tokens per second) over wall time, with an arrow at each interruption.

    Steps that were lost are not in ``metrics.jsonl``, so the lines have gaps there.
    """
    unit_s, unit = next(((size, name) for size, name in _UNITS if result.wall_s >= 2 * size), _UNITS[-1])
    speed, title, format_y = (_MFU, "MFU", format_frac) if _MFU in run.names else (_SPEED, "tokens/s", format_count)
    panels = [
        Panel("training loss, nats per token", [_over_time(run, result, "loss/train/total", unit_s)], log_y=True),
        Panel(title, [_over_time(run, result, speed, unit_s)], from_zero=True, format_y=format_y),
    ]
    shown = result.interruptions[-_ARROWS:]
    left_out = len(result.interruptions) - len(shown)
    return timeline(
        panels,
        [_arrow(each, result, unit_s) for each in shown],
        title=f"Interruptions: {len(result.interruptions) or 'none'}",
        x_label=f"{unit} since the start",
        x_range=(0.0, result.wall_s / unit_s),
        width=width,
        more=f"{left_out} earlier interruptions are left out; 'smalti runs show' lists them." if left_out else "",
    )


def _over_time(run: RunRecord, result: Ledger, name: str, unit_s: float) -> Series:
    """Return a metric over wall time, smoothed, with gaps at the interruptions."""
    stamps = {row["step"]: seconds_of(row.get("time")) for row in run.rows}
    steps, values = run.series(name)
    known = [(at, y) for step, y in zip(steps, values, strict=True) if (at := stamps.get(int(step))) is not None]
    window = max(1, len(known) // 100)
    smoothed = smooth([y for _, y in known], window=window)
    points = sorted(zip((at for at, _ in known), smoothed, strict=True))
    points += [(each.at_s, float("nan")) for each in result.interruptions]
    points.sort(key=lambda point: point[0])
    return Series(name, [(at - result.start_s) / unit_s for at, _ in points], [y for _, y in points])


def _arrow(fault: Interruption, result: Ledger, unit_s: float) -> Arrow:
    since_s = fault.at_s - result.start_s
    lines = (
        f"{format_seconds(since_s)}, step {fault.step}: {what_happened(fault)}",
        f"{how_detected(fault)}; {what_was_done(fault)}",
    )
    down_s = fault.detect_s + fault.restart_s + fault.idle_s
    return Arrow(since_s / unit_s, lines, until=(since_s + down_s) / unit_s)
