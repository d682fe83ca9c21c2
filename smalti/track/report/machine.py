"""The charts of the report about the machine that rank 0 trained on (``system/...``)."""

import re
from collections.abc import Callable

from smalti.base.chart import Series, line_chart
from smalti.base.units import format_count, format_frac
from smalti.track.report.read import RunRecord

_WIDTH, _HEIGHT = 440, 220
_GPU = re.compile(r"system/gpu(\d+)/")


def _decimal(value: float) -> str:
    """Return a size as text: ``2.5 GB``. Units are powers of ten, like the ticks of an axis."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


Chart = tuple[str, tuple[tuple[str, str], ...], Callable[[float], str] | None]

_CHARTS: tuple[Chart, ...] = (
    ("CPU time in use", (("system/cpu_frac", "machine"),), format_frac),
    ("Cores that rank 0 keeps busy", (("system/process_cpu_cores", "rank 0"),), None),
    (
        "Memory in use",
        (("system/memory_used_bytes", "machine"), ("system/process_memory_bytes", "rank 0")),
        _decimal,
    ),
    (
        "Disks, bytes per second",
        (("system/disk_read_bytes_per_s", "read"), ("system/disk_write_bytes_per_s", "written")),
        _decimal,
    ),
    (
        "Network, bytes per second",
        (("system/net_in_bytes_per_s", "received"), ("system/net_out_bytes_per_s", "sent")),
        _decimal,
    ),
    ("Free space for the run folder", (("system/disk_free_bytes", "free"),), _decimal),
)

_GPU_CHARTS: tuple[tuple[str, str, Callable[[float], str] | None], ...] = (
    ("GPUs: time with a kernel running", "busy_frac", format_frac),
    ("GPUs: memory in use", "memory_used_bytes", _decimal),
    ("GPUs: power, watts", "power_watts", format_count),
    ("GPUs: temperature, degrees C", "temperature_celsius", None),
    ("GPUs: clock, MHz", "sm_clock_mhz", format_count),
)


def machine_charts(run: RunRecord) -> list[str]:
    """Return a chart for each kind of reading, with a line for each GPU; none for a kind without a value above 0."""
    gpus = sorted({int(match[1]) for name in run.names if (match := _GPU.match(name))})
    charts = [
        *_CHARTS,
        *(
            (title, tuple((f"system/gpu{gpu}/{name}", f"GPU {gpu}") for gpu in gpus), format_y)
            for title, name, format_y in _GPU_CHARTS
        ),
    ]
    return [chart for row in charts if (chart := _chart(run, *row)) is not None]


def _chart(
    run: RunRecord, title: str, names: tuple[tuple[str, str], ...], format_y: Callable[[float], str] | None
) -> str | None:
    series = [Series(label, *run.series(name)) for name, label in names if name in run.names]
    if not any(value > 0 for line in series for value in line.y):
        return None
    return line_chart(
        series, title=title, x_label="step", from_zero=True, format_y=format_y, width=_WIDTH, height=_HEIGHT
    )
