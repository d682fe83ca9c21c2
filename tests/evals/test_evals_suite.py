"""The suite: what it writes, and what it refuses."""

import json
from pathlib import Path

import pytest
from tiny_models import ByteTokenizer, UniformModel, write_byte_tokens

from smalti.base.errors import DataError, UserError
from smalti.config.eval import EvalConfig, suites, task_lines
from smalti.config.task import TaskConfig
from smalti.evals import results, suite
from smalti.evals.cache import Cache
from smalti.evals.results import TaskResult
from smalti.serve.engine.engine import Engine


@pytest.fixture
def engine() -> Engine:
    return Engine(UniformModel(), ByteTokenizer(), name="uniform")


def test_results_and_samples_are_written(engine: Engine, tmp_path: Path) -> None:
    config = EvalConfig(n=5, heldout={"code": write_byte_tokens(tmp_path / "t", ["abc", "é"])}, seq_len=32, shots=1)
    announced: list[str] = []
    report = suite.run(engine, config, str(tmp_path / "run"), about={"step": 7}, announce=announced.append)
    folder = Path(report["folder"])
    assert folder.parent == tmp_path / "run/evals/demo"
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", "samples.jsonl"]
    stored = json.loads((folder / "results.json").read_text())
    assert stored == {key: value for key, value in report.items() if key != "folder"}
    assert list(stored["tasks"]) == announced == ["heldout/code", "arithmetic", "brackets"]
    assert stored["step"] == 7
    assert stored["model"] == "uniform"
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().split("\n")[:-1]]
    assert [line["task"] for line in lines] == ["heldout/code"] * 2 + ["arithmetic"] * 5 + ["brackets"] * 5


def test_nothing_is_written_without_a_place(engine: Engine) -> None:
    assert "folder" not in suite.run(engine, EvalConfig(n=2, tasks=("brackets",), shots=0))


def test_two_runs_give_two_folders_and_equal_numbers(engine: Engine, tmp_path: Path) -> None:
    config = EvalConfig(n=3, tasks=("brackets",), shots=1)
    one, two = (suite.run(engine, config, str(tmp_path)) for _ in range(2))
    assert one["folder"] != two["folder"]
    assert {**one["tasks"]["brackets"], "wall_s": 0} == {**two["tasks"]["brackets"], "wall_s": 0}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        results.write(tmp_path / "suite", {}, [TaskResult("a", {}, [{"bad": object()}])])
    assert list((tmp_path / "suite").iterdir()) == []


def test_heldout_without_data_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="no held-out token files"):
        suite.run(engine, EvalConfig())


def test_missing_folders_are_named_before_anything_is_scored(engine: Engine, tmp_path: Path) -> None:
    folders = {"a": write_byte_tokens(tmp_path / "a", ["abc"]), "b": "none", "c": str(tmp_path)}
    announced: list[str] = []
    with pytest.raises(DataError, match=r"heldout\.b = none, heldout\.c = "):
        suite.run(engine, EvalConfig(heldout=folders), announce=announced.append)
    assert not announced
    suite.check_folders(EvalConfig(heldout=folders, tasks=("brackets",)))


def test_progress_rises_to_the_whole(engine: Engine) -> None:
    calls: list[tuple[str, int, int]] = []
    config = EvalConfig(n=6, tasks=("brackets",), shots=1, batch_tokens=128)
    suite.run(engine, config, progress=lambda *now: calls.append(now))
    assert len(calls) > 2
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert {name for name, _, _ in calls} == {"brackets (task 1 of 1)"}
    assert calls[-1][1] == calls[-1][2]


def test_a_context_longer_than_the_model_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="seq_len=65 is longer than the model's 64"):
        suite.run(engine, EvalConfig(tasks=("brackets",), seq_len=65))
    assert suite.context_tokens(engine, EvalConfig()) == 64


def test_every_task_of_every_suite_is_described() -> None:
    assert {task for name, config in suites().items() if name != "lm-eval" for task in config.tasks} <= set(
        task_lines()
    )
    assert all(config.suite == name for name, config in suites().items())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    return tmp_path / "model"


def test_an_interrupted_evaluation_resumes(engine: Engine, tmp_path: Path, model: Path) -> None:
    config = EvalConfig(tasks=("arithmetic", "brackets"), n=5, seq_len=64)
    began: list[str] = []

    def interrupt(name: str) -> None:
        began.append(name)
        if name == "brackets":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run(engine, config, announce=interrupt, cache=Cache(tmp_path / "cache", model, "fp32"))
    assert began == ["arithmetic", "brackets"]
    scores = suite.run(engine, config, cache=Cache(tmp_path / "cache", model, "fp32"))["tasks"]
    assert [score.get("cached") for score in scores.values()] == [True, None]
    fresh = suite.run(engine, config)["tasks"]
    times = ("wall_s", "cached")
    for name, score in scores.items():
        assert {key: value for key, value in score.items() if key not in times} == {
            key: value for key, value in fresh[name].items() if key not in times
        }


def test_what_changes_a_score_is_in_the_key_of_the_cache(engine: Engine, tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "own.jsonl"
    rows.write_text('{"context": "a", "continuation": "b"}\n')
    tokens = write_byte_tokens(tmp_path / "t", ["abc", "def"])
    own = TaskConfig(kind="exact", file=str(rows))
    config = EvalConfig(tasks=("arithmetic", own, "heldout"), heldout={"code": tokens}, n=3, seq_len=64)

    def cached(config: EvalConfig, dtype: str = "fp32") -> list[bool]:
        scores = suite.run(engine, config, cache=Cache(tmp_path / "cache", model, dtype))["tasks"]
        return ["cached" in score for score in scores.values()]

    assert cached(config) == [False] * 3
    (model / "export.json").write_text('{"time": "later"}')
    assert cached(config) == cached(config.model_copy(update={"batch_tokens": 64})) == [True] * 3
    assert cached(config.model_copy(update={"seed": 2})) == [False, True, False]
    assert cached(config.model_copy(update={"n": 2})) == [False, True, True]
    assert cached(config.model_copy(update={"limit": 1})) == [True, False, True]
    for damaged in (tmp_path / "cache").glob("*.json"):
        damaged.write_bytes(damaged.read_bytes()[:-9])
    assert cached(config) == [False] * 3
    assert cached(config) == [True] * 3
    assert cached(config, "bf16") == [False] * 3
    rows.write_text('{"context": "a", "continuation": "c"}\n')
    assert cached(config) == [True, False, True]
    (model / "model.safetensors").write_bytes(b"other weights")
    assert cached(config) == [False] * 3
