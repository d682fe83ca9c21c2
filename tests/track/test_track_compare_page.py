"""The page of several runs and the overlaid curves: complete, escaped, and refused if they would mislead."""

import shutil
import xml.etree.ElementTree
from pathlib import Path

import pytest
from synthetic_run import write_lines, write_run
from test_track_report import CHROMIUM, Checker

from smalti.base.errors import UserError
from smalti.track.compare.page import comparison_page, write_comparison, write_plot
from smalti.track.report.read import read_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first, second = write_run(tmp_path / "one", steps=200), write_run(tmp_path / "two", steps=120)
    text = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(text.replace("name: demo", "name: '<b>two</b>'"))
    return [first, second]


def test_page_holds_every_part_and_is_well_formed(runs: list[Path]) -> None:
    path = write_comparison(runs)
    assert path == str(runs[0].parent / "report.html")
    text = Path(path).read_text()
    for part in ("2 runs", "&lt;b&gt;two&lt;/b&gt;", "loss/train/total, nats/token", "tokens/s, median", "200 of 600",
                 "held-out prose, bits per byte", "What differs", "brackets"):  # fmt: skip
        assert part in text, part
    assert "<b>two" not in text
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.seen


def test_a_chart_alone_is_a_whole_svg_file(runs: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    write_plot([read_run(run) for run in runs], path, metric="throughput/tokens_per_sec", x="tokens")
    assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")
    assert ">tokens<" in path.read_text()


@pytest.mark.parametrize(
    ("file", "metric", "x", "said"),
    [
        ("a.png", None, None, ".html, .svg"),
        ("a.svg", "loss/train/totals", None, "did you mean loss/train/total?"),
        ("a.svg", None, "steps", "--x steps is not an axis"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    runs: list[Path], tmp_path: Path, file: str, metric: str | None, x: str | None, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        write_plot([read_run(run) for run in runs], tmp_path / file, metric=metric, x=x)
    assert said in str(caught.value)


def test_more_runs_than_colours_are_refused(runs: list[Path]) -> None:
    with pytest.raises(UserError, match="9 runs are too many for one chart"):
        comparison_page([read_run(runs[0])] * 9)


def test_runs_without_a_step_have_a_page(runs: list[Path]) -> None:
    for run in runs:
        (run / "metrics.jsonl").unlink()
        shutil.rmtree(run / "evals")
    assert "No step has been logged yet" in comparison_page([read_run(run) for run in runs])


def test_runs_of_another_kind_have_a_page(runs: list[Path]) -> None:
    for run in runs:
        write_lines(run / "metrics.jsonl", [{"step": step, "l2_norm/grad/global": 1.0 / step} for step in (1, 2, 3)])
    assert "l2_norm/grad/global" in comparison_page([read_run(run) for run in runs])


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_draws_the_page(runs: list[Path], tmp_path: Path) -> None:
    import subprocess

    path, picture = write_comparison(runs), tmp_path / "page.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += [f"--screenshot={picture}", "--window-size=1120,2000", f"file://{Path(path).resolve()}"]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert picture.stat().st_size > 50_000
