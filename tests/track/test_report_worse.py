"""Held-out sets that get worse within a stage are named, and noise is not."""

import random
from pathlib import Path

import pytest
from example_config import example_config
from synthetic_run import write_lines, write_run

from smalti.cli.runs.show import about
from smalti.cli.train.done import warn_of_worse
from smalti.config.load import dump
from smalti.track.compare.comparison import compare
from smalti.track.report.page import page
from smalti.track.report.read import RunRecord, read_run
from smalti.track.report.worse import worse_in_stages
from smalti.track.run import RunFolder

STAGES = "data.stages=[{until: 0.5run, weights: {code: 1}}, {weights: {code: 1}}]"


def measured(folder: Path, values: dict[str, list[float]]) -> RunRecord:
    """A run of 100 steps in two stages of 50, whose held-out sets had these values at equal distances."""
    write_run(folder)
    overrides = ["train.duration=100step", "data.sources={code: a}", STAGES]
    (folder / "config.yaml").write_text(dump(example_config(f"name={folder.name}", *overrides)))
    count = len(next(iter(values.values())))
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": 100 * (i + 1) // count, "loss/train/total": 3.0}
            | {f"metrics/eval/{name}/bits_per_byte": series[i] for name, series in values.items()}
            for i in range(count)
        ],
    )
    return read_run(folder)


def test_a_set_that_rises_in_a_stage_is_named_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prose = [3, 2.8, 2.6, 2.5, 2.4, 2.45, 2.5, 2.55, 2.6, 2.6]
    run = measured(tmp_path / "r", {"code": [3 - i / 10 for i in range(10)], "prose": prose})
    result = worse_in_stages(run)
    assert [(one.name, one.stage) for one in result] == [("prose", 1)]
    line = "held-out 'prose' got worse in stage 1: 2.4000 at step 50, 2.6000 at step 100 (+8.3% bits per byte)"
    assert result[0].words() == line
    assert line.replace("'", "&#x27;") in page(run, None)
    assert line in about(tmp_path / "r", n_events=0)["notes"]
    warn_of_worse(RunFolder.read(run.folder))
    assert capsys.readouterr().err == f"warning: {line}\n"
    assert compare([run, run]).notes[0].endswith(f"r: {line}")


@pytest.mark.parametrize(
    ("values", "stages"),
    [
        ([2.0, 2.2], [1]),  # the one measurement of stage 1
        ([2.0, 1.9, 1.9, 2.1], []),  # the last alone is no trend
        ([2.0, 2.0, 2.03, 2.03], []),  # less than 2 %
        ([2.0, 2.2, 2.2, 1.9, 1.9, 1.9], [0]),  # a stage that ended worse, whatever came after
        ([2.0], []),
    ],
)
def test_the_rule(tmp_path: Path, values: list[float], stages: list[int]) -> None:
    assert [one.stage for one in worse_in_stages(measured(tmp_path / "r", {"code": values}))] == stages


def test_noise_is_seldom_named(tmp_path: Path) -> None:
    draw = random.Random(4)
    sets = {f"s{i}": [2 * (1 + draw.gauss(0, 0.005)) for _ in range(20)] for i in range(500)}
    wrong = len(worse_in_stages(measured(tmp_path / "r", sets)))
    assert wrong < 10  # of 1,000 stages


def test_a_run_without_stages_or_config_has_none(tmp_path: Path) -> None:
    run = measured(tmp_path / "r", {"code": [2.0, 2.2]})
    (tmp_path / "r" / "config.yaml").unlink()
    assert worse_in_stages(read_run(run.folder)) == []
