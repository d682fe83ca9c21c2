"""The list of runs: fast, with a line for a broken folder."""

import json
import shutil
import time
from pathlib import Path

import pytest
from synthetic_run import write_lines, write_run

from smalti.track.listing import best_eval, list_runs, newest
from smalti.track.report.read import read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "whole")
    broken = {
        "torn-config": ("config.yaml", "model: {a: [1,\n"),
        "no-mapping": ("config.yaml", "just words\n"),
        "torn-status": ("status.json", '{"state": "run'),
        "only-metrics": ("metrics.jsonl", '{"step": 1}\n'),
    }
    for name, (file, text) in broken.items():
        (root / name).mkdir()
        (root / name / "config.yaml").write_text("name: x\n") if file == "status.json" else None
        (root / name / file).write_text(text)
    (root / "just-a-folder").mkdir()
    (root / "a-file").write_text("")
    return root


def test_broken_folders_are_listed_with_the_reason(runs: Path) -> None:
    result = {Path(run.folder).name: run for run in list_runs(str(runs))}
    assert set(result) == {"whole", "torn-config", "no-mapping", "torn-status", "only-metrics"}
    assert result["whole"].problem is None
    said = {"torn-config": "line", "no-mapping": "key: value", "torn-status": "JSON", "only-metrics": "missing"}
    for name, word in said.items():
        assert result[name].state == "broken"
        assert word in (result[name].problem or ""), result[name].problem


def test_values_of_a_run(runs: Path) -> None:
    run = next(run for run in list_runs(str(runs)) if run.problem is None)
    assert (run.name, run.state, run.step, run.steps_total, run.attempt) == ("whole", "done", 600, 600, 1)
    assert run.tokens == 600 * 8192
    assert run.train_s == pytest.approx(600 * 0.51)
    assert run.best_eval is not None
    assert run.best_eval.metric == "bits_per_byte"
    assert json.dumps(run.to_json())


def test_a_copied_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    before = (tmp_path / "copy/config.yaml").read_bytes()
    assert sorted(run.name for run in list_runs(str(tmp_path))) == ["base", "copy"]
    assert read_run(tmp_path / "copy").name == "copy"
    assert (tmp_path / "copy/config.yaml").read_bytes() == before


def test_the_best_eval_is_the_lowest_mean_over_sources(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "metrics/eval/a/LanguageCrossEntropy": 3.0, "metrics/eval/b/LanguageCrossEntropy": 5.0},
        {"step": 2, "metrics/eval/a/LanguageCrossEntropy": 1.0, "metrics/eval/b/LanguageCrossEntropy": 4.0},
        {"step": 3, "metrics/eval/a/LanguageCrossEntropy": 2.0, "metrics/eval/b/LanguageCrossEntropy": None},
        {"step": 4, "metrics/eval/a/LanguageCrossEntropy": 2.9},
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    result = best_eval(tmp_path / "metrics.jsonl")
    assert result is not None
    assert (result.value, result.step, result.metric) == (2.0, 3, "LanguageCrossEntropy")


def test_the_newest_values_of_a_long_file_are_at_its_end(tmp_path: Path) -> None:
    rows = [{"step": step, "loss/train/total": 1 / step, "note": "x" * 300} for step in range(1, 2000)]
    path = tmp_path / "metrics.jsonl"
    write_lines(path, rows)
    with path.open("a") as file:
        file.write('{"step": 2000, "loss/tr')
    step, values = newest(path)
    assert (step, values) == (1999, {"loss/train/total": 1 / 1999})
    path.write_text(json.dumps({"step": 7, "loss/train/total": 2.0, "note": "x" * 100_000}) + "\n")
    assert newest(path) == (7, {"loss/train/total": 2.0})


def test_a_metric_that_was_asked_for_is_found_in_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/config.yaml").write_text("name: one\n")
    rows: list[dict[str, float | str]] = [
        {"step": step, "loss/train/total": 1.0, "note": "x" * 300} for step in range(1, 1000)
    ]
    rows.insert(300, {"step": 300, "metrics/eval/code/bits_per_byte": 1.5})
    rows.insert(500, {"step": 500, "metrics/eval/code/bits_per_byte": 1.25})
    write_lines(tmp_path / "one/metrics.jsonl", rows)
    (run,) = list_runs(str(tmp_path), metrics=["metrics/eval/code/bits_per_byte", "ckpt/save_s"])
    assert run.metrics == {"loss/train/total": 1.0, "metrics/eval/code/bits_per_byte": 1.25}


@pytest.mark.slow
def test_many_runs_are_listed_fast(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "0000")
    for number in range(1, 200):
        folder = tmp_path / f"{number:04d}"
        folder.mkdir()
        for name in ("config.yaml", "status.json", "metrics.jsonl"):
            (folder / name).hardlink_to(whole / name)
    began = time.perf_counter()
    assert len(list_runs(str(tmp_path))) == 200
    assert time.perf_counter() - began < 5  # 0.5 s on two quiet cores
