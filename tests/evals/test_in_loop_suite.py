"""Tasks during training: the scores of an export of the same step, at the steps that are due."""

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from in_loop_runs import metrics_of, on_export, run_config, scores_of
from pydantic import ValidationError
from tiny_models import tiny_model

from smalti.base.errors import UserError
from smalti.config.eval import InLoopConfig
from smalti.config.run import RunConfig
from smalti.evals.in_loop_suite import suite_hook
from smalti.track.report import write_report
from smalti.train import build, fit


def _train(rank: int, config: RunConfig) -> None:
    fit(build(config, tasks=suite_hook))


@pytest.mark.slow
def test_scores_are_those_of_the_export(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    _train(0, config)
    rows = scores_of(config)
    assert list(rows) == [2, 4, 5]
    assert rows[5] == pytest.approx(metrics_of(on_export(config)), rel=1e-5)
    assert rows[2] != rows[5]
    report = Path(write_report(config.run_folder)).read_text()
    assert report.count(": score over tokens") == 6  # a title and a label of each of three


def test_averages_are_named_partial_and_what_a_score_lacks_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "gauntlet/commonsense_reasoning"
    folder.mkdir(parents=True)
    rows = [{"query": f"{n}", "choices": ["yes", "no", "if"], "gold": n % 3} for n in range(6)]
    (folder / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "siqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({**row, "passage": "p"}) + "\n" for row in rows))
    tasks = [
        {"kind": "choice", "name": column, "file": str(file), "columns": {"cluster": column}}
        for column in ("gold", "passage")
    ]
    config = run_config(tmp_path, suite="gauntlet", tasks=["gauntlet", *tasks], data=str(tmp_path / "gauntlet"))
    evaluate, _ = suite_hook(config)
    assert evaluate is not None
    metrics = evaluate(tiny_model(config.model), 0)
    prefix = "icl/metrics/eval_gauntlet"
    values = [metrics[f"{prefix}/{name}"] for name in ("copa", "siqa")]
    expected = sum((value - chance) / (1 - chance) for value, chance in zip(values, (0.5, 0.5), strict=True)) / 2
    assert metrics[f"{prefix}/core_average"] == pytest.approx(expected)
    assert metrics[f"{prefix}/commonsense_reasoning/n_missing"] == 5
    assert metrics[f"{prefix}/core_average/n_missing"] == 29
    assert f"{prefix}/gold/low" in metrics
    assert f"{prefix}/passage" in metrics
    assert f"{prefix}/passage/stderr" not in metrics  # one cluster has no error
    assert all(isinstance(value, float | int) for value in metrics.values())


@pytest.mark.exhaustive
def test_two_ranks_score_as_the_export(tmp_path: Path) -> None:
    config = run_config(tmp_path, ranks=2)
    run_ranks(2, _train, config)
    assert scores_of(config)[5] == pytest.approx(metrics_of(on_export(config)), rel=1e-5)


def test_the_named_suite_is_taken_and_changed() -> None:
    evals = InLoopConfig.model_validate({"suite": "gauntlet", "limit": 5, "data": "somewhere"})
    assert (evals.tasks, evals.limit, evals.every) == (("gauntlet",), 5, "0.1run")


def test_an_unknown_suite_is_refused_unless_it_has_tasks() -> None:
    with pytest.raises(ValidationError, match="there is no suite 'gauntlt'"):
        InLoopConfig.model_validate({"suite": "gauntlt"})
    assert InLoopConfig.model_validate({"suite": "mine", "tasks": ["brackets"]}).tasks == ("brackets",)


def test_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ranks may see different clocks"):
        run_config(tmp_path, every="10min")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["heldout"]}, "evals has no task that runs during training: heldout"),
        ({"tasks": ["arithmetik"]}, "there is no task 'arithmetik'"),
        ({"max_bytes": 9}, "evals.max_bytes has no effect on the tasks during training: arithmetic, brackets, own"),
        ({"tasks": ["brackets"], "limit": 9}, "evals.limit has no effect"),
        ({"chat": False}, "evals.chat=False has no effect"),
        ({"suite": "gauntlet", "tasks": ["gauntlet"]}, "the Gauntlet's files are not part of Smalti"),
    ],
)
def test_wrong_tasks_are_refused_before_the_first_step(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        suite_hook(run_config(tmp_path, **changes))


def test_tasks_that_nothing_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tasks= for evals"):
        build(run_config(tmp_path))
