"""The Gauntlet: v0.3 equals a slow implementation of LLM Foundry's formulas; averages; files; what is missing."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from published_gauntlet import TASKS, Reference, is_right, parts_of, rows_of
from tiny_models import ByteTokenizer, llama_config, tiny_model
from tiny_runs import tiny_tokenizer

from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig
from smalti.evals import suite
from smalti.evals.gauntlet import files
from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.table import BENCHMARKS, BY_NAME, CORE
from smalti.evals.tasks import generation
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import Completion

DATA = Path(__file__).parents[3] / "shared/gauntlet"
LIMIT = 4
"""Rows of each file: of the first ones, and of each sub-category, prompts, shots and grades are compared."""
SEQ_LEN = 900


class BeginTokenizer(ByteTokenizer):
    """Bytes, a begin token in its template, and a token for ' a'."""

    template_ids = (256,)

    def encode(self, text: str) -> list[int]:
        return list(text.replace(" a", "\0").encode())


@pytest.fixture(scope="module")
def bpe_engine() -> Engine:
    return _engine(tiny_tokenizer())


@pytest.fixture(scope="module")
def byte_engine() -> Engine:
    return _engine(BeginTokenizer())


def _engine(tokenizer: Any) -> Engine:
    return Engine(tiny_model(llama_config(vocab_size=tokenizer.vocab_size, context=2048)), tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A few rows of every kind, in LLM Foundry's layout."""
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in list(TASKS)[:5]}
    for i in range(9):
        part = "ab"[i % 2]
        rows["jeopardy"].append({"context": f" What {i}? ", "continuation": f"This {i * i}", "category": part})
        rows["arc_easy"].append({"query": f"Question: {i}", "choices": ["a", "some b", "an c "], "gold": i % 3})
        rows["winogrande"].append(
            {"context_options": [f"It {i}", f"a {i}"], "continuation": f"was {i}.", "gold": i % 2}
        )
        rows["triviaqa_sm_sub"].append(
            {"context": f"Q{i}\nAnswer:", "answer": f"The {i}", "aliases": [f"{i}", "!"][: i % 3]}
        )
        rows["svamp"].append({"context": f"{i}+1", "answer": f"{i + 1}", "chain_of_thought": f"( {i} + 1 )"})
    for name, values in rows.items():
        path = tmp_path / f"{TASKS[name][0]}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in values))
    return tmp_path


def _canned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, str]]:
    """Let answers be chosen by the prompt: right ones, wrong ones, and ones that only begin right."""
    calls: list[tuple[list[int], int, str]] = []

    def generate(engine, prompts, params):
        texts = []
        for number, ids in enumerate(prompts):
            text = (
                "The answer is 3",
                "5\n\nThe answer is 1",
                "The 4, of course",
                "Question: 1",
                "5 The answer is 12.",
            )[(number + sum(ids)) % 5]
            calls.append((list(ids), params.max_tokens, text))
            texts.append(Completion("", text, (), "stop", len(ids)))
        return texts

    monkeypatch.setattr(generation, "generate", generate)
    return calls


def _assert_equals_the_reference(
    name: str, folder: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, kind, shots, chance, settings = TASKS[name]
    benchmark = BY_NAME[name]
    assert (benchmark.path, benchmark.shots, benchmark.chance) == (f"{file}.jsonl", shots, chance)
    calls = _canned(monkeypatch)
    seq_len = SEQ_LEN if kind != "Gen" else 2048
    config = EvalConfig(tasks=[name], data=str(folder), mode="v0.3", limit=LIMIT, seq_len=seq_len, batch_tokens=2048)
    report = suite.run(engine, config, str(tmp_path / "results"))
    samples = [json.loads(line) for line in Path(report["folder"], "samples.jsonl").read_text().split("\n")[:-1]]
    reference = Reference(engine.model, engine.tokenizer, engine.tokenizer.template_ids, seq_len)
    parts = parts_of(rows_of(folder / f"{file}.jsonl"), settings)
    means, place = [], 0
    samples.sort(key=lambda sample: sample.get("category", ""))
    for number, rows in enumerate(parts):
        limit = (LIMIT + len(parts) - 1 - number) // len(parts)
        if not limit:
            continue
        right = []
        if kind == "Gen":
            requests, longest = reference.generation_requests(rows, shots, settings, limit)
            for (ids, answers), call in zip(requests, calls, strict=True):
                assert call[:2] == (ids, longest)
                right.append(is_right(call[2], answers, settings))
            place += len(right)
        else:
            for losses, correct in reference.likelihood_results(rows, kind, shots, settings, limit):
                sample = samples[place]
                per_token = [-a / b for a, b in zip(sample["log_likelihoods"], sample["n_tokens"], strict=True)]
                assert per_token == pytest.approx(losses, rel=1e-4)
                assert sample["correct"] == correct
                right.append(correct)
                place += 1
        means.append(sum(right) / len(right))
    assert place == len(samples) == report["tasks"][name]["n"]
    assert report["tasks"][name]["accuracy"] == pytest.approx(sum(means) / len(means))


@pytest.mark.parametrize("tokenizer", ["byte_engine", "bpe_engine"])
@pytest.mark.parametrize("name", list(TASKS)[:5])
def test_v03_equals_the_formulas(
    name: str,
    tokenizer: str,
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _assert_equals_the_reference(name, folder, request.getfixturevalue(tokenizer), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(TASKS))
def test_v03_equals_the_formulas_on_the_real_files(
    name: str, bpe_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (DATA / f"{TASKS[name][0]}.jsonl").is_file():
        pytest.skip("the files of the Gauntlet are not here")
    _assert_equals_the_reference(name, DATA, bpe_engine, tmp_path, monkeypatch)


def test_the_table_has_39_benchmarks_in_six_categories() -> None:
    counts = Counter(benchmark.category for benchmark in BENCHMARKS)
    assert dict(counts) == {
        "world_knowledge": 6,
        "commonsense_reasoning": 7,
        "language_understanding": 4,
        "symbolic_problem_solving": 8,
        "reading_comprehension": 6,
        "programming": 8,
    }
    assert len(BY_NAME) == 39
    tasks = [benchmark.task("x.jsonl") for benchmark in BENCHMARKS if benchmark.kind != "code"]
    assert len(tasks) == 31


def _scores(names: Iterable[str], accuracy: float = 0.5) -> dict[str, dict[str, Any]]:
    interval = [accuracy - 0.06, accuracy + 0.06]
    score = {"value": accuracy, "accuracy": accuracy, "n": 1000, "stderr": 0.03, "interval": interval}
    return {name: dict(score) for name in names}


def test_averages_by_hand() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS if benchmark.kind != "code"]
    for mode in ("v0.3", "fixed"):
        result = averages(_scores(names), {}, mode)
        understanding = result["categories"]["language_understanding"]
        # lambada .5, hellaswag (.5 - .25) / .75, winograd and winogrande 0
        assert understanding["value"] == pytest.approx((0.5 + 1 / 3 + 0 + 0) / 4)
        errors = (0.03, 0.03 / 0.75, 0.03 / 0.5, 0.03 / 0.5)
        assert understanding["stderr"] == pytest.approx(sum(error**2 for error in errors) ** 0.5 / 4, rel=1e-3)
        values = [result["categories"][category]["value"] for category in CORE]
        assert result["core_average"]["value"] == pytest.approx(sum(values) / 5)
        assert understanding["interval"][1] - understanding["value"] == pytest.approx(
            2 * understanding["stderr"], rel=1e-3
        )
        assert "partial" not in result["core_average"]
        assert list(result["dropped"]) == ["programming"]


def test_a_missing_benchmark_drops_the_category_or_gives_a_named_partial_score() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS if benchmark.kind != "code" and benchmark.name != "squad"]
    whole = averages(_scores([*names, "squad"]), {}, "v0.3")
    published = averages(_scores(names), {"squad": "no file"}, "v0.3")
    assert published["dropped"]["reading_comprehension"] == ["squad"]
    values = [whole["categories"][category]["value"] for category in CORE if category != "reading_comprehension"]
    assert published["core_average"]["value"] == pytest.approx(sum(values) / 4)
    fixed = averages(_scores(names), {"squad": "no file"}, "fixed")
    assert fixed["categories"]["reading_comprehension"]["partial"] == "partial: without squad"
    assert fixed["core_average"]["partial"] == "partial: without squad"
    assert (fixed["core_average"]["n"], fixed["missing"]) == (5, {"squad": "no file"})
    assert [mean["core_average"]["n_missing"] for mean in (whole, published, fixed)] == [0, 1, 1]
    assert averages({}, {}, "fixed")["core_average"] is None


def test_always_the_most_frequent_label_is_not_above_chance_in_fixed() -> None:
    scores = _scores(["commonsense_qa"], accuracy=0.403)
    published = averages(scores, {}, "v0.3")["scores"]["commonsense_qa"]
    assert published == pytest.approx(0.204)  # as LLM Foundry has it
    scores["commonsense_qa"]["baseline"] = 0.403
    assert averages(scores, {}, "fixed")["scores"]["commonsense_qa"] == 0


def test_the_suite_runs_what_is_there(folder: Path, byte_engine: Engine) -> None:
    config = EvalConfig(tasks=["gauntlet"], data=str(folder), limit=4, seq_len=32)
    report = suite.run(byte_engine, config)
    assert set(report["tasks"]) == {"jeopardy", "arc_easy", "winogrande", "triviaqa_sm_sub"}
    missing = report["gauntlet"]["missing"]
    assert missing["mmlu"] == "no file world_knowledge/mmlu.jsonl"
    assert "sandbox" in missing["human_eval"]
    assert "longest context is 32" in missing["svamp"]
    assert len(report["tasks"]) + len(missing) == 39
    assert {"accuracy", "n", "stderr", "interval", "chance", "majority", "permuted"} <= set(report["tasks"]["arc_easy"])
    assert (
        "without bigbench_qa_wikidata, arc_challenge, mmlu"
        in report["gauntlet"]["categories"]["world_knowledge"]["partial"]
    )


def test_benchmarks_with_longer_prompts_are_left_out_and_named(folder: Path, byte_engine: Engine) -> None:
    config = EvalConfig(tasks=["gauntlet"], data=str(folder), limit=4, seq_len=64, cut_prompts=False)
    report = suite.run(byte_engine, config)
    assert "arc_easy" not in report["tasks"]
    assert report["gauntlet"]["missing"]["arc_easy"].startswith("4 of 4 prompts have more tokens")
    assert all(score["cut_frac"] == 0 for score in report["tasks"].values())


def test_what_cannot_run_is_named(folder: Path) -> None:
    cases: list[tuple[str, str | None, str]] = [
        ("arc_easy", None, r"not part of Smalti(.|\n)*data=DIR"),
        ("mmlu", str(folder), r"no file .*world_knowledge/mmlu.jsonl(.|\n)*llm-foundry"),
        ("human_eval", str(folder), "needs the sandbox"),
        ("arc_eazy", str(folder), r"there is no task 'arc_eazy'(.|\n)*did you mean arc_easy"),
        ("gauntlet", str(folder / "none"), "none of the Gauntlet's files"),
    ]
    for name, data, text in cases:
        with pytest.raises(UserError, match=text):
            suite.check_folders(EvalConfig(tasks=[name], data=data))


def test_files_are_checked(folder: Path) -> None:
    states = {check.benchmark.name: check.state for check in files.check(str(folder))}
    assert states["arc_easy"] == "different"
    assert states["mmlu"] == "missing"
    assert len(states) == 39
    (folder / "squad.jsonl").write_text('{"context": "a", "continuation": "b"}\n\n')
    row = next(check.row() for check in files.check(str(folder)) if check.benchmark.name == "squad")
    assert (row["state"], row["rows"], row["licence"], row["runs"]) == ("unknown digest", 1, "CC BY-SA 4.0", True)
