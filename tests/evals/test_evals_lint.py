"""The linter: every planted defect by file and line, what is known of the real files, nothing in clean sets."""

import json
import random
from pathlib import Path

import pytest

from smalti.base.errors import DataError
from smalti.cli.main import run as smalti
from smalti.config.task import TaskConfig
from smalti.evals.lint import Finding, kind_of, lint_file, lint_results, lint_task

DATA = Path(__file__).parents[3] / "shared/gauntlet"
WORDS = tuple("amber birch cedar delta ember fjord grove heron iris juniper kestrel lotus maple nectar onyx".split())  # noqa: SIM905


def _write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _clean(kind: str, seed: int, n: int = 120) -> list[dict[str, object]]:
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for i in range(n):
        first = draw.sample(WORDS, 4)
        options = [" ".join([word, *draw.sample(WORDS, draw.randint(1, 3))]) for word in first]
        question = f"{seed}: which is number {i}?"
        gold = draw.randrange(4)
        rows.append(
            {
                "choice": {"query": question, "choices": options, "gold": gold},
                "schema": {"context_options": options, "continuation": f"is number {i}", "gold": gold},
                "exact": {"context": question, "continuation": options[0] + f" {i}"},
                "generation": {"context": question, "answer": f"{i + 10}", "aliases": [options[1]]},
            }[kind]
        )
    return rows


def _found(path: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in lint_file(path)}


@pytest.mark.parametrize("kind", ["choice", "schema", "exact", "generation"])
def test_a_clean_set_has_no_findings(kind: str, tmp_path: Path) -> None:
    for seed in range(4):
        path = _write(tmp_path / "t.jsonl", _clean(kind, seed))
        assert kind_of(path) == kind
        assert lint_file(path) == []


def test_planted_defects_of_choices(tmp_path: Path) -> None:
    rows = _clean("choice", 1)
    path = tmp_path / "t.jsonl"
    assert set(_found(_write(path, [row | {"gold": 2} for row in rows]))) >= {"constant gold"}
    skewed = _found(_write(path, [row | ({"gold": 1} if i % 3 else {}) for i, row in enumerate(rows)]))["skewed gold"]
    assert "option 1" in skewed.message
    assert 2 in skewed.lines
    longest = [row | {"gold": max(range(4), key=lambda i, row=row: len(row["choices"][i]))} for row in rows]  # type: ignore[index]
    assert "the longest option" in _found(_write(path, longest))["length"].message
    copied = _found(_write(path, [*rows, rows[4], rows[7]]))["duplicate"]
    assert copied.lines == (121, 122)
    rows[10] = rows[10] | {"choices": ["amber", "birch", "amber", "cedar"], "gold": 1}
    rows[11] = rows[11] | {"choices": ["amber", " ", "birch", "cedar"], "gold": 0}
    found = _found(_write(path, rows))
    assert (found["equal options"].lines, found["empty answer"].lines) == ((11,), (12,))
    given = [row | {"query": f"Say {row['choices'][row['gold']]}!"} for row in _clean("choice", 2)]  # type: ignore[index]
    assert len(_found(_write(path, given))["answer in prompt"].lines) > 110


def test_planted_defects_of_generated_answers(tmp_path: Path) -> None:
    rows = _clean("generation", 3)
    rows[0] |= {"answer": "7"}
    rows[1] |= {"aliases": ["The"]}
    rows[2] |= {"answer": ""}
    rows[3] |= {"answer": "juniper", "context": "What does Juniper\u2028grow on?"}
    found = _found(_write(tmp_path / "t.jsonl", rows))
    lines = {name: finding.lines for name, finding in found.items()}
    assert lines == {
        "one-character answer": (1,),
        "empty label": (2,),
        "empty answer": (3,),
        "answer in prompt": (4,),
        "line separator": (4,),
    }
    always = [row | {"answer": "yes"} if i % 2 else row for i, row in enumerate(rows[4:])]
    assert "'yes'" in _found(_write(tmp_path / "t.jsonl", always))["skewed gold"].message


def test_an_answer_that_is_mostly_in_the_prompt_is_a_reading_task(tmp_path: Path) -> None:
    rows = [{"context": f"The {word} is here.", "continuation": word} for word in WORDS]
    assert lint_file(_write(tmp_path / "t.jsonl", rows)) == []


def test_bad_rows_and_unknown_columns(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", [*_clean("choice", 1, 3), {"query": "a", "choices": ["b", "c"], "gold": 2}])
    (finding,) = lint_file(path)
    assert (finding.check, finding.lines) == ("bad row", (4,))
    with pytest.raises(DataError, match="those of no kind of task"):
        lint_file(_write(tmp_path / "u.jsonl", [{"text": "a"}]))
    with pytest.raises(DataError, match="there is no file"):
        lint_task(TaskConfig(kind="exact", file="none.jsonl"))


def test_ceiling_and_floor() -> None:
    scores = {
        "easy": {"metric": "accuracy", "value": 0.99, "interval": [0.97, 1.0], "chance": 0.25},
        "good": {"metric": "accuracy", "value": 0.6, "interval": [0.5, 0.7], "chance": 0.25},
        "hard": {"metric": "accuracy", "value": 0.26, "interval": [0.2, 0.3], "chance": 0.25},
        "text": {"metric": "bits_per_byte", "value": 1.0},
    }
    assert [(f.check, f.message.split(":")[0]) for f in lint_results(scores, "r")] == [
        ("ceiling", "easy"),
        ("floor", "hard"),
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = _write(tmp_path / "good.jsonl", _clean("exact", 1))
    bad = _write(tmp_path / "bad.jsonl", [row | {"gold": 0} for row in _clean("choice", 1)])
    (tmp_path / "task.yaml").write_text("kind: choice\nfile: bad.jsonl\n")
    assert smalti(["eval", "lint", good]) == 0
    assert "no findings in 1 files" in capsys.readouterr().out
    assert smalti(["eval", "lint", good, str(tmp_path / "task.yaml")]) == 3
    captured = capsys.readouterr()
    assert "constant gold" in captured.out
    assert "1, 2, 3, 4 and 116 more" in captured.out
    assert smalti(["eval", "lint", bad, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["lines"] == list(range(1, 121))
    (tmp_path / "world_knowledge").mkdir()
    Path(bad).rename(tmp_path / "world_knowledge/arc_easy.jsonl")
    assert smalti(["eval", "lint", "--suite", "gauntlet", f"data={tmp_path}"]) == 3
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"tasks": {"t": {"metric": "accuracy", "interval": [0, 0.4], "chance": 0.3}}}))
    assert smalti(["eval", "lint", "--results", str(results)]) == 3
    for wrong in ([], ["--suite", "gauntlet"], ["--suite", "demo", "data=x"]):
        assert smalti(["eval", "lint", *wrong]) == 2


@pytest.mark.slow
def test_the_known_defects_of_the_real_files() -> None:
    if not DATA.is_dir():
        pytest.skip("the files of the Gauntlet are not here")
    known = {
        ("commonsense_reasoning/bigbench_strange_stories", "constant gold"): 174,
        ("commonsense_reasoning/bigbench_novel_concepts", "constant gold"): 32,
        ("commonsense_reasoning/commonsense_qa", "skewed gold"): 492,
        ("reading_comprehension/boolq", "skewed gold"): 2033,
        ("symbolic_problem_solving/bigbench_simple_arithmetic", "duplicate"): 30,
        ("symbolic_problem_solving/gsm8k_prepended_8shot", "one-character answer"): 252,
        ("symbolic_problem_solving/svamp", "one-character answer"): 107,
        ("symbolic_problem_solving/math_complex_soln", "empty label"): 3,
        ("world_knowledge/triviaqa_sm_sub", "empty label"): 1,
        ("world_knowledge/triviaqa_sm_sub", "line separator"): 1,
    }
    for (name, check), count in known.items():
        assert len(_found(str(DATA / f"{name}.jsonl"))[check].lines) == count, (name, check)
    for name in ("reading_comprehension/agi_eval_lsat_rc", "commonsense_reasoning/copa"):
        assert lint_file(str(DATA / f"{name}.jsonl")) == []
