"""The suite lm-eval: tasks of lm-evaluation-harness on the engine, as results and samples of ours."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import llama_config, tiny_model
from tiny_runs import tiny_tokenizer

from smalti.base.errors import DataError, UserError
from smalti.config.eval import EvalConfig
from smalti.evals import suite
from smalti.evals.likelihood import Window, score_greedy
from smalti.evals.lm_eval.samples import group_scores, sample_of, score_of
from smalti.evals.lm_eval.tasks import groups_of
from smalti.evals.reader.reading import read
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.find import find_tasks
from smalti.serve.engine.engine import Engine

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{more}
"""
KINDS = {
    "mine_choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: options
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "mine_word": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{options[0]}}"
metric_list: [{metric: acc}, {metric: perplexity}]""",
    "mine_answer": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]""",
    "mine_text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]""",
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = tiny_tokenizer()
    return Engine(tiny_model(llama_config(vocab_size=tokenizer.vocab_size, context=64)), tokenizer)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_yaml_files(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"question": f"plain words {i}, def", "options": [f"{i}", "add a", "class"][: 2 + i % 2], "gold": i % 2}
        for i in range(7)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, more in KINDS.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, more=more))
    tasks = [str(tmp_path / f"{name}.yaml") for name in KINDS]
    config = EvalConfig(suite="lm-eval", tasks=tasks, limit=6)
    report = suite.run(engine, config, str(tmp_path / "results"))
    scores = report["tasks"]
    assert list(scores) == list(KINDS)
    samples: dict[str, list[dict[str, Any]]] = {}
    for line in Path(report["folder"], "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        samples.setdefault(sample["task"], []).append(sample)
    for name in ("mine_choice", "mine_word", "mine_answer"):
        reported = scores[name]["lm_eval"]["reported"]
        assert scores[name]["n"] == len(samples[name]) == 6
        assert scores[name]["value"] == reported.get("acc,none", reported.get("exact_match,none"))
    assert (
        scores["mine_choice"]["metrics"]["acc_norm"]["value"]
        == scores["mine_choice"]["lm_eval"]["reported"]["acc_norm,none"]
    )
    assert scores["mine_choice"]["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    for row, sample in zip(rows, samples["mine_choice"], strict=False):
        encode = engine.tokenizer.encode
        before = encode(row["question"])
        windows = [Window(np.array(encode(f"{row['question']} {text}")), len(before)) for text in row["options"]]
        assert sample["log_likelihoods"] == pytest.approx(
            (-score_greedy(engine.model, windows).nats).tolist(), abs=1e-4
        )
        assert (sample["prompt"], sample["gold"]) == (row["question"], row["gold"])
    assert scores["mine_answer"]["truncated_frac"] == sum(s["truncated"] for s in samples["mine_answer"]) / 6
    assert scores["mine_text"]["value"] == pytest.approx(
        scores["mine_text"]["lm_eval"]["reported"]["bits_per_byte,none"]
    )
    reading = read(report["folder"])
    assert [score.task for score in reading.scores] == list(KINDS)
    assert [score.before.value for score in reading.scores] == pytest.approx(
        [score["value"] for score in scores.values()]
    )
    with pytest.raises(UserError, match="no task 'arc_esy'"):
        suite.run(engine, EvalConfig(suite="lm-eval", tasks=("arc_esy",)))
    data.unlink()
    with pytest.raises(DataError, match="cannot load"):
        suite.run(engine, config)


def test_a_choice_between_contexts() -> None:
    row = {
        "doc_id": 3,
        "arguments": [("It was a", " dog."), ("It was b", " dog.")],
        "filtered_resps": [(-2.0, False), (-1.0, True)],
        "metrics": ["acc"],
        "acc": 1.0,
    }
    sample = sample_of(row, "multiple_choice", 1)
    assert (sample["prompt"], sample["choices"]) == ("It was b", ["It was a", "It was b"])
    score = score_of([sample, wrong := sample | {"metrics": {"acc": 0.0}}], [], "multiple_choice", {})
    assert (sample["continuation"], sample["choice"], sample["correct"]) == (" dog.", 1, True)
    assert wrong["correct"] is False
    assert (score["metric"], score["value"], score["chance"], score["n"]) == ("accuracy", 0.5, 0.5, 2)


def test_another_metric_than_accuracy_has_a_mean() -> None:
    row = {
        "doc_id": 0,
        "arguments": [("Q", {})],
        "resps": [["an answer"]],
        "filtered_resps": ["[invalid]"],
        "metrics": ["f1"],
    }
    values = (0.0, 0.5, 1.0, None)  # a row without the metric does not count
    samples = [sample_of(row | {"f1": value}, "generate_until", ["a", "b"]) for value in values]
    assert (samples[0]["answers"], samples[0]["parsed"]) == (["a", "b"], None)
    samples = [sample | {"truncated": True} for sample in samples]
    score = score_of(samples, [], "generate_until", {})
    assert [sample.get("score") for sample in samples] == [0.0, 0.5, 1.0, None]
    assert not any("correct" in sample for sample in samples)
    assert (score["metric"], score["value"], score["n"]) == ("f1", 0.5, 3)
    assert score["interval"][0] < 0.5 < score["interval"][1]
    assert (score["truncated_frac"], score["unparsed_frac"]) == (1.0, 1.0)
    zeros = [sample_of(row | {"f1": 0.0}, "generate_until", "a") | {"truncated": False} for _ in range(2)]
    assert score_of(zeros, [], "generate_until", {})["metric"] == "f1"
    without = [sample_of(row | {"f1": None}, "generate_until", "a") | {"truncated": False} for _ in range(2)]
    score = score_of(without, [], "generate_until", {"bleu,none": 3.5, "bleu_stderr,none": 0.1})
    assert (score["metric"], score["value"], score["interval"]) == ("bleu", 3.5, None)


def test_groups_have_the_mean_of_their_tasks_with_lm_evals_weights() -> None:
    def group(name: str, by_size: bool, tasks: str) -> Any:
        members = [SimpleNamespace(task_name=task) for task in tasks]
        metrics = [SimpleNamespace(metric="acc", weight_by_size=by_size)]
        return SimpleNamespace(name=name, aggregate_metric_list=metrics, get_all_tasks=lambda: members)

    plain = SimpleNamespace(name="plain", aggregate_metric_list=None, get_all_tasks=list)
    groups = groups_of([group("by_size", True, "ab"), group("equal", False, "ab"), group("mixed", True, "bc"), plain])
    assert groups["b"] == {"by_size": True, "equal": False, "mixed": True}
    samples = {"a": [True] * 30 + [False] * 10, "b": [True, False] * 5}
    tasks = {
        name: accuracy([{"correct": right} for right in rows], 0.0) | {"lm_eval": {"groups": groups[name]}}
        for name, rows in samples.items()
    }
    tasks["c"] = {"metric": "f1", "value": 0.1, "n": 3, "lm_eval": {"groups": groups["c"]}}
    scores = group_scores(tasks)
    assert scores["by_size"]["value"] == pytest.approx(35 / 50)
    assert scores["equal"]["value"] == pytest.approx((0.75 + 0.5) / 2)
    assert (scores["equal"]["n"], scores["equal"]["n_tasks"], "mixed" in scores) == (50, 2, False)
    assert scores["by_size"]["interval"][0] < 0.7 < scores["by_size"]["interval"][1]


def test_without_lm_eval_the_command_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="not installed") as caught:
        suite.check_folders(EvalConfig(suite="lm-eval"))
    assert "smalti[lm-eval]" in str(caught.value.hint)


def test_the_suite_is_not_for_training() -> None:
    with pytest.raises(UserError, match="'smalti eval run' alone"):
        find_tasks(EvalConfig(suite="lm-eval"))
