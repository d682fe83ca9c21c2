"""The synthetic instructions: disjoint operands, right answers, and files that tuning and evaluation read."""

import json
import re
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from smalti.evals.tasks.find import load_task
from smalti.evals.tasks.items import read_items
from smalti.tune.instructions import Instruction, instructions, kinds, split_of, write

N = {"train": 600, "validation": 120, "heldout": 600}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Instruction]]:
    return {split: list(instructions(range(n), seed=1, split=split)) for split, n in N.items()}


def _pairs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.rpartition(": ")[2])
    return {tuple(sorted(pair)) for pair in pairwise(words)}


def test_no_operand_is_in_two_splits(rows: dict[str, list[Instruction]]) -> None:
    operands = {split: {text for row in of_split for text in row.operands} for split, of_split in rows.items()}
    for split, texts in operands.items():
        assert {split_of(text) for text in texts} == {split}
    _are_disjoint(operands)
    strings = {"repeat", "twice", "swap", "first", "last", "nth", "commas"}
    pairs = {
        split: set().union(*(_pairs(row.prompt[-1]["content"]) for row in of_split if row.kind in strings))
        for split, of_split in rows.items()
    }
    assert len(pairs["heldout"]) > 50
    _are_disjoint(pairs)
    numbers = {
        split: {
            tuple(sorted(re.findall(r"\d+", row.prompt[-1]["content"])))
            for row in of_split
            if row.kind in {"larger", "sort"}
        }
        for split, of_split in rows.items()
    }
    assert len(numbers["heldout"]) > 20
    _are_disjoint(numbers)


def _are_disjoint(sets: dict[str, set[Any]]) -> None:
    for a, b in combinations(sets.values(), 2):
        assert not a & b


def test_answers_are_right(rows: dict[str, list[Instruction]]) -> None:
    for row in chain(*rows.values()):
        end = "." if row.prompt[0]["content"] == "End every answer with a full stop." else ""
        assert row.answer.endswith(end)
        assert row.wrong.endswith(end)
        assert row.answer != row.wrong
        question, answer = row.prompt[-1]["content"], row.answer.removesuffix(end)
        numbers = sorted(int(text) for text in re.findall(r"\d+", question))
        text = question.rpartition(": ")[2]
        expected = {
            "repeat": text,
            "twice": f"{text} {text}",
            "first": text.split()[0],
            "last": text.split()[-1],
            "swap": " ".join(reversed(text.split())),
            "larger": str(max(numbers, default=0)),
            "sort": " ".join(map(str, numbers)),
            "number": str(sum(numbers)),
            "commas": text.replace(" ", ", "),
        }
        assert answer == expected.get(row.kind, answer), row
        if row.kind == "call":
            function, argument = re.findall(r"(\w+),? (?:with the argument|with|given) (\w+)", question)[0]
            assert answer == f"{function}({argument})"
    assert {row.kind for row in rows["heldout"]} == set(kinds())


def test_files_are_those_of_the_seed_and_a_task_reads_them(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        write(folder, n_train=30, n_heldout=30, n_preferences=15, seed=seed)
    names = {path.name for path in Path(folders[0]).iterdir()}
    assert names == {
        *("train.jsonl", "heldout.jsonl", "validation.jsonl", "instructions.yaml", "validation.yaml"),
        *("preferences.jsonl", "heldout-preferences.jsonl", "validation-preferences.jsonl"),
    }
    texts = [[Path(folder, name).read_text() for name in sorted(names)] for folder in folders]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    for task, split in (("instructions", "heldout"), ("validation", "validation")):
        items = read_items(load_task(f"{folders[0]}/{task}.yaml").config)
        chats = [json.loads(line) for line in Path(folders[0], f"{split}.jsonl").read_text().splitlines()]
        assert [item.answers[0] for item in items] == [chat["messages"][-1]["content"] for chat in chats]
        assert {item.category for item in items} == set(kinds())
    preference = json.loads(Path(folders[0], "preferences.jsonl").read_text().splitlines()[0])
    assert preference.keys() == {"prompt", "chosen", "rejected", "kind"}
    assert preference["prompt"][-1]["role"] == "user"
