"""Comparisons of results: pairs of items, averages of the Gauntlet, and results that do not match."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_samples import document, example, generated, ranked, write_results

from smalti.base.errors import DataError, UserError
from smalti.evals.compare import Comparison, compare
from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.table import BENCHMARKS
from smalti.evals.results import TaskResult, write
from smalti.evals.statistics import paired
from smalti.evals.tasks.accuracy import accuracy


def answers(n: int, accuracy: float, seed: int, **labels: Any) -> list[dict[str, Any]]:
    right = np.random.default_rng(seed).random(n) < accuracy
    return [ranked(index, 0 if right[index] else 1, 0.6) | labels for index in range(n)]


def row(comparison: Comparison, name: str) -> dict[str, Any]:
    values = comparison.to_json()["comparisons"][name]
    assert isinstance(values, dict)
    return values


def test_a_clear_difference_has_a_winner_and_noise_has_none(tmp_path: Path) -> None:
    write_results(
        tmp_path / "a", {"sums": answers(300, 0.3, 1), "words": answers(300, 0.5, 2), "old": answers(5, 1, 3)}
    )
    write_results(
        tmp_path / "b", {"sums": answers(300, 0.6, 4), "words": answers(300, 0.5, 5), "new": answers(5, 1, 3)}
    )
    comparison = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    sums, words = row(comparison, "sums"), row(comparison, "words")
    assert (sums["verdict"], words["verdict"]) == ("B better", "no difference shown")
    assert sums["difference"] == pytest.approx(sums["b"] - sums["a"])
    assert sums["difference"] > sums["smallest_detectable_difference"] > 0.05
    assert words["p_corrected"] == words["p"] or words["p_corrected"] == min(1, 2 * words["p"])
    assert (comparison.only_a, comparison.only_b) == (["old"], ["new"])
    alone = compare(str(tmp_path / "a"), str(tmp_path / "b"), tasks=["words"])
    assert ([each.name for each in alone.rows], alone.only_a) == (["words"], [])
    assert row(alone, "words")["p_corrected"] == words["p"]


def test_each_kind_of_task_is_compared_as_it_is_scored(tmp_path: Path) -> None:
    example(tmp_path / "a")
    example(tmp_path / "b", shift=1)
    comparison = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    text = row(comparison, "heldout/prose")
    assert text["metric"] == "bits_per_byte"
    assert text["difference"] == pytest.approx(1 / np.log(2) / 100)  # each document has one nat more and 100 bytes
    topics = row(comparison, "topics")  # categories of equal weight, clusters of two items
    samples = [sample for sample in comparison.a.samples if sample.task == "topics"]
    score = accuracy(
        [{"correct": each.correct, "category": each.category, "cluster": each.cluster} for each in samples], 0.0
    )
    assert (topics["a"], topics["n"]) == (score["value"], len(samples))


def test_lower_bits_per_byte_are_better(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 1, 40)
    write_results(tmp_path / "a", {"text": [document(i, 90 + noise[i]) for i in range(40)]})
    write_results(tmp_path / "b", {"text": [document(i, 80 + noise[i] / 2) for i in range(40)]})
    assert row(compare(str(tmp_path / "a"), str(tmp_path / "b")), "text")["verdict"] == "B better"
    assert row(compare(str(tmp_path / "b"), str(tmp_path / "a")), "text")["verdict"] == "A better"


def test_averages_of_the_gauntlet_are_paired_too(tmp_path: Path) -> None:
    names = [each for each in BENCHMARKS if each.category == "language_understanding"]
    for folder, share in (("a", 0.5), ("b", 0.6)):
        tasks = {each.name: answers(80, share, 7) for each in names}
        scores = {each.name: accuracy([{"correct": row["correct"]} for row in tasks[each.name]], 0) for each in names}
        write_results(tmp_path / folder, tasks, gauntlet=averages(scores, {}, "fixed"))
    comparison = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    tasks_alone = [
        each.difference.rescaled(next(b.chance for b in names if b.name == each.name)) for each in comparison.rows[:4]
    ]
    average = row(comparison, "language_understanding")
    assert average["difference"] == pytest.approx(paired.average(tasks_alone).value)
    assert average["stderr"] < max(each.stderr or 0 for each in tasks_alone)
    assert average["a"] == pytest.approx(
        comparison.a.about["gauntlet"]["categories"]["language_understanding"]["value"]
    )
    assert row(comparison, "core_average")["difference"] == average["difference"]
    one = compare(str(tmp_path / "a"), str(tmp_path / "b"), tasks=[names[0].name])
    assert [each.name for each in one.rows] == [names[0].name]


def test_the_same_results_twice(tmp_path: Path) -> None:
    folder = example(tmp_path / "a")
    with pytest.raises(UserError, match="A and B are the same results"):
        compare(str(tmp_path / "a"), str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "item 9.*B does not have it: 10 and 9 items"),
        (lambda rows: [*rows[:4], rows[4] | {"prompt": "Another?"}, *rows[5:]], "item 4: its prompt is not the same"),
        (lambda rows: [*rows[:4], rows[4] | {"gold": 2}, *rows[5:]], "item 4: its right answer is not the same"),
        (
            lambda rows: [rows[0] | {"choices": [" red", " blue", " green"]}, *rows[1:]],
            "item 0: its options are not the same",
        ),
        (
            lambda rows: [rows[0] | {"choices": [" red", " green", " pink"]}, *rows[1:]],
            "item 0: its options are not the same",
        ),
        (lambda rows: [{key: row[key] for key in row if key != "correct"} for row in rows], "item 0 has neither"),
    ],
)
def test_items_that_differ(change: Any, message: str, tmp_path: Path) -> None:
    rows = answers(10, 0.5, 1)
    write_results(tmp_path / "a", {"sums": rows})
    write_results(tmp_path / "b", {"sums": change(rows)})
    with pytest.raises(DataError, match=message):
        compare(str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "v0.3"}, "mode: fixed and v0.3"),
        ({"shots": 3}, "shots: 0 and 3"),
        ({"chat": "chat_template.jinja"}, "a chat template: False and True"),
        ({"max_new_tokens": 9}, "max_new_tokens: None and 9"),
        ({"sha256": "b"}, "sha256: a and b"),
        ({"task": {"file": "b", "rank_by": "sum"}}, "the task: {} and .*sum"),
        ({"cut_frac": 0.1}, "seq_len, with prompts that were cut: 256 and 512"),
    ],
)
def test_settings_that_differ(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    score = {"mode": "fixed", "shots": 0, "sha256": "a", "task": {"file": "a"}, "cut_frac": 0.0}
    for name, seq_len, own in (("a", 256, score), ("b", 512, score), ("c", 512, score | change)):
        write_results(tmp_path / name, {"sums": answers(10, 0.5, 1)}, tasks={"sums": own}, seq_len=seq_len)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert len(compare(a, b).rows) == 1
    with pytest.raises(DataError, match=f"sums: A and B differ in {message}"):
        compare(a, c)


@pytest.mark.parametrize(("higher", "verdict"), [(True, "B better"), (False, "A better")])
def test_grades_between_right_and_wrong(higher: bool, verdict: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).uniform(0, 0.4, 40)
    scores = {"sums": {"metric": "f1", **({} if higher else {"higher_is_better": False})}}
    for name, base in (("a", 0.2), ("b", 0.5)):
        rows = [generated(i, "x", "x") | {"score": base + noise[i]} for i in range(40)]
        rows = [{key: row[key] for key in row if key != "correct"} for row in rows]
        write_results(tmp_path / name, {"sums": rows}, tasks=scores)
    values = row(compare(str(tmp_path / "a"), str(tmp_path / "b")), "sums")
    assert (values["metric"], values["verdict"]) == ("f1", verdict)
    assert values["difference"] == pytest.approx(0.3)


def write_windows(folder: Path, seq_len: int) -> None:
    task = TaskResult("text", {}, [document(i, 90 + i) for i in range(4)])
    write(folder / "evals/mine", {"suite": "mine", "tasks": {"text": {"seq_len": seq_len}}}, [task])


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    write_windows(tmp_path / "a", 256)
    write_windows(tmp_path / "b", 512)
    write_results(tmp_path / "c", {"sums": answers(4, 0.5, 1)}, suite="other")
    a, b, c = (str(tmp_path / name) for name in "abc")
    with pytest.raises(DataError, match="seq_len: 256 and 512"):
        compare(a, b)
    with pytest.raises(DataError, match="no task in common"):
        compare(a, c)
    with pytest.raises(DataError, match="the task 'sums' is not in both"):
        compare(a, b, tasks=["sums"])
    with pytest.raises(DataError, match="no results of the suite 'mine'"):
        compare(a, c, suite="mine")
