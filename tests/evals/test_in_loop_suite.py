"""Tasks during training: the scores of an export of the same step, at the steps that are due."""

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from pydantic import ValidationError
from tiny_models import tiny_model
from tiny_runs import tiny_run

from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig, InLoopConfig
from smalti.config.load import from_dict, load
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint.export import export
from smalti.evals import suite
from smalti.evals.in_loop_suite import suite_hook
from smalti.serve.engine.engine import Engine
from smalti.track.report import write_report
from smalti.train import build, fit

QUESTIONS = {"n": 12, "shots": 1}
ROWS = [
    {"query": "3+4=", "choices": ["7", "12", "x y"], "gold": 0},
    {"query": "def add(a, b):", "choices": ["return a + b", "plain"], "gold": 0},
    {"query": "plain", "choices": ["words", "x: int", "Point"], "gold": 0},
]


def _config(root: Path, ranks: int = 1, **evals: Any) -> RunConfig:
    if not (root / "runs/tiny").exists():
        tiny_run(root)
        (root / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = load(RunConfig, str(root / "runs/tiny")).config.model_dump(mode="json")
    values |= {"name": f"ranks-{ranks}", "folder": str(root / f"runs/ranks-{ranks}"), "track": {"console": False}}
    values["data"] |= {"tokenizer": str(root / "data/tokenizer"), "seq_len": 64}
    values["data"]["heldout"] = {}
    values["train"] |= {"duration": "5step", "precision": {"compute": "fp32"}, "global_batch_tokens": 128}
    values["train"] |= {"parallel": {"ranks": ranks, "threads": 1, "device": "cpu"}}
    own = {"kind": "choice", "file": str(root / "own.jsonl"), "shots": 1}
    values["evals"] = {"tasks": ["arithmetic", "brackets", own], "every": "2step", **QUESTIONS, **evals}
    return from_dict(RunConfig, values, "test").config


def _train(rank: int, config: RunConfig) -> None:
    fit(build(config, tasks=suite_hook))


def _rows(config: RunConfig) -> dict[int, dict[str, float]]:
    rows = map(json.loads, (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines())
    scored = [row for row in rows if any(name.startswith("icl/") for name in row)]
    return {row["step"]: {name: value for name, value in row.items() if name.startswith("icl/")} for row in scored}


def _of_export(config: RunConfig) -> dict[str, float]:
    """The scores of ``smalti eval run`` on the export, under the names of the metrics."""
    assert config.evals is not None
    export(config.run_folder)
    engine = Engine.from_folder(Path(config.run_folder) / "export")
    asked = config.evals.model_dump(mode="json", exclude={"every"}) | {"seq_len": config.data.seq_len}
    scores = suite.run(engine, from_dict(EvalConfig, asked, "test").config)["tasks"]
    measures = {"": "accuracy", "/stderr": "stderr", "/gold_probability": "gold_probability"}
    measures |= {"/bits_per_byte": "bits_per_byte"}
    values = {f"{task}{end}": score[key] for task, score in scores.items() for end, key in measures.items()}
    for task, score in scores.items():
        values[f"{task}/low"], values[f"{task}/high"] = score["interval"]
    return {f"icl/metrics/demo/{name}": value for name, value in values.items()}


@pytest.mark.slow
def test_scores_are_those_of_the_export(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _train(0, config)
    rows = _rows(config)
    assert list(rows) == [2, 4, 5]
    assert rows[5] == pytest.approx(_of_export(config), rel=1e-5)
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
    config = _config(tmp_path, suite="gauntlet", tasks=["gauntlet", *tasks], data=str(tmp_path / "gauntlet"))
    hook = suite_hook(config)
    assert hook is not None
    metrics = hook(tiny_model(config.model), 0)
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
    config = _config(tmp_path, ranks=2)
    run_ranks(2, _train, config)
    assert _rows(config)[5] == pytest.approx(_of_export(config), rel=1e-5)


def test_the_named_suite_is_taken_and_changed() -> None:
    evals = InLoopConfig.model_validate({"suite": "gauntlet", "limit": 5, "data": "somewhere"})
    assert (evals.tasks, evals.limit, evals.every) == (("gauntlet",), 5, "0.1run")


def test_an_unknown_suite_is_refused_unless_it_has_tasks() -> None:
    with pytest.raises(ValidationError, match="there is no suite 'gauntlt'"):
        InLoopConfig.model_validate({"suite": "gauntlt"})
    assert InLoopConfig.model_validate({"suite": "mine", "tasks": ["brackets"]}).tasks == ("brackets",)


def test_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ranks may see different clocks"):
        _config(tmp_path, every="10min")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["heldout"]}, "evals has no task that runs during training: heldout"),
        ({"tasks": ["arithmetik"]}, "there is no task 'arithmetik'"),
        ({"suite": "gauntlet", "tasks": ["gauntlet"]}, "the Gauntlet's files are not part of Smalti"),
    ],
)
def test_wrong_tasks_are_refused_before_the_first_step(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        suite_hook(_config(tmp_path, **changes))


def test_tasks_that_nothing_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tasks= for evals"):
        build(_config(tmp_path))
