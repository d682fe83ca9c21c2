"""The section on continued pretraining: the table, the verdicts, the chart, and values that cannot be compared."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from synthetic_run import metric_rows, write_lines, write_run

from smalti.cli.runs.show import about, about_text
from smalti.track.report import write_report
from smalti.track.report.continued import Change, continued
from smalti.track.report.read import read_run

BITS = "metrics/eval/{}/bits_per_byte"


def _run(folder: Path, *, step_0: bool = True, **config: Any) -> Path:
    """A continued run: code rises from 1.30 to 1.34 bits per byte, prose falls from 2.0 to 1.8."""
    write_run(folder)
    rows = [row for row in metric_rows() if not any(name.startswith("metrics/eval") for name in row)]
    for step, code, prose in ((0, 1.3, 2.0), (300, 1.31, 1.9), (600, 1.34, 1.8))[not step_0 :]:
        rows.append({"step": step, BITS.format("code"): code, BITS.format("prose"): prose})
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "events.jsonl", [{"event": "eval", "step": 0, "attempt": 0},
                                          {"event": "eval", "step": 300, "attempt": 0},
                                          {"event": "eval", "step": 600, "attempt": 1}])  # fmt: skip
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["data"] |= {"seq_len": 256, "retain": {"code": 0.02}}
    tree |= {"init_from": "runs/old/export", **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def test_the_table_shows_what_was_kept_and_what_was_learned(tmp_path: Path) -> None:
    result = continued(read_run(_run(tmp_path / "r")))
    assert result is not None
    assert result.table_rows() == [
        ("old", "code", "1.3000", "1.3400", "+3.08 %", "+2 %", "worse than its bound"),
        ("new", "prose", "2.0000", "1.8000", "-10.00 %", "-", "learned"),
    ]
    halfway = continued(read_run(tmp_path / "r"), step=450)
    assert halfway is not None
    assert (halfway.step, halfway.table_rows()[0][-1]) == (300, "kept")


def test_a_run_of_its_own_weights_or_without_step_0_has_no_such_section(tmp_path: Path) -> None:
    assert continued(read_run(_run(tmp_path / "own", init_from=None))) is None
    assert continued(read_run(_run(tmp_path / "late", step_0=False))) is None
    assert "Continued pretraining" not in Path(write_report(tmp_path / "own")).read_text()


def test_values_that_were_measured_otherwise_are_not_compared(tmp_path: Path) -> None:
    folder = _run(tmp_path / "r")
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["data"]["seq_len"] = 512
    own = folder / "logs/attempt-1/config.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(yaml.safe_dump(tree))
    result = continued(read_run(folder))
    assert result is not None
    assert result.unlike == "data.seq_len 256 -> 512"
    assert {words[-1] for words in result.table_rows()} == {"not measured alike"}
    text = Path(write_report(folder)).read_text()
    assert "Not to be compared: data.seq_len 256 -&gt; 512" in text
    assert "Change of bits per byte" not in text


def test_the_report_and_runs_show_have_the_section(tmp_path: Path) -> None:
    folder = _run(tmp_path / "r")
    text = Path(write_report(folder)).read_text()
    section = text[text.index("<h2>Continued") : text.index("<h2>Evaluation")]
    for part in ("Change of bits per byte", "old: code", "new: prose", "worse than its bound", "runs/old/export"):
        assert part in section, part
    assert len(re.findall(r'class="l s\d dashed"', section)) == 2  # the bound, wide and narrow
    shown = about(folder, n_events=0)
    assert [(one["set"], one["before"], one["allowed_frac"]) for one in shown["continued"]["sets"]] == [
        ("code", 1.3, 0.02), ("prose", 2.0, None),
    ]  # fmt: skip
    assert "+3.08 %" in about_text(shown)


@pytest.mark.parametrize(
    ("after", "allowed", "passed", "verdict"),
    [
        (1.02, 0.05, 0, "kept"),
        (0.9, 0.05, 0, "kept"),
        (1.06, 0.05, 1, "worse than its bound"),
        (1.11, 0.05, 2, "worse than its bound"),
        (float("nan"), 0.05, float("inf"), "worse than its bound"),
        (0.99, None, 0, "learned"),
        (1.0, None, 0, "not better"),
    ],
)
def test_verdicts(after: float, allowed: float | None, passed: float, verdict: str) -> None:
    change = Change("s", 1.0, after, allowed)
    assert (change.times_bound_exceeded, change.verdict) == (passed, verdict)
