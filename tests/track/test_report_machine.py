"""The report's charts of the machine: one for each reading, and no gap for the others."""

from pathlib import Path

from synthetic_run import metric_rows, write_lines, write_run

from smalti.track.report import write_report
from smalti.track.report.machine import machine_charts
from smalti.track.report.read import read_run


def with_readings(folder: Path) -> Path:
    write_run(folder, steps=60)
    rows = metric_rows(60)
    for row in rows[::10]:
        row |= {"system/cpu_frac": 0.5, "system/memory_used_bytes": 2.5e9, "system/net_in_bytes_per_s": 0.0}
        row |= {f"system/gpu{gpu}/{name}": 40.0 + gpu for gpu in (0, 1, 10) for name in ("power_watts", "busy_frac")}
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def test_gpus_share_a_chart_and_what_is_zero_has_none(tmp_path: Path) -> None:
    charts = machine_charts(read_run(with_readings(tmp_path / "demo")))
    titles = ("CPU time in use", "Memory in use", "GPUs: time with a kernel running", "GPUs: power, watts")
    assert len(charts) == len(titles)
    assert all(title in chart for title, chart in zip(titles, charts, strict=True))
    assert charts[-1].index("GPU 1<") < charts[-1].index("GPU 10<")
    assert "GB" in charts[1]


def test_a_run_without_readings_has_no_such_section(tmp_path: Path) -> None:
    assert "<h2>Machine" in Path(write_report(with_readings(tmp_path / "demo"))).read_text()
    assert "<h2>Machine" not in Path(write_report(write_run(tmp_path / "other"))).read_text()
