"""Rows of IFEval: every defect is an error that names the row, the file and the line, and what is allowed."""

import json
from pathlib import Path
from typing import Any

import pytest

from smalti.base.errors import DataError
from smalti.evals.graders.ifeval.rows import Row, load_rows
from smalti.evals.graders.ifeval.verifiers import VERIFIERS

PROMPTS = Path(__file__).parents[3].parent / "shared" / "ifeval" / "prompts.jsonl"
WORDS = {"relation": "at least", "num_words": 3}


def line(**changes: Any) -> str:
    row = {"key": 7, "prompt": "Write.", "instruction_id_list": ["length_constraints:number_words"], "kwargs": [WORDS]}
    return json.dumps({name: value for name, value in (row | changes).items() if value != "absent"})


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    empty_columns = {**WORDS, "keywords": None, "language": None}
    path.write_text(f"{line()}\n\n{line(key='b', kwargs=[empty_columns], extra=1)}\n", encoding="utf-8")
    rows = load_rows(path)
    assert [row.key for row in rows] == [7, "b"]
    assert rows[1].kwargs == [WORDS]


@pytest.mark.parametrize(
    ("text", "message", "allowed"),
    [
        ("{", "not JSON", "one JSON object a line"),
        ("[1]", "[1]", "a JSON object"),
        (line(prompt="absent"), "without prompt", "prompt"),
        (line(prompt=" "), "key or prompt", "text"),
        (line(kwargs=[]), "key 7: instruction_id_list and kwargs", "one length"),
        (line(kwargs=[], instruction_id_list=[]), "key 7: instruction_id_list and kwargs", "at least one"),
        (line(kwargs=[3]), "key 7: an entry of kwargs", "an object"),
        (line(instruction_id_list=["length_constraints:number_word"]), "no instruction 'length", "startend:quotation"),
        (line(kwargs=[{"relation": "at least"}]), "number_words: missing: num_words", "relation"),
        (line(kwargs=[{**WORDS, "letter": "a"}]), "missing: none; unknown: letter", "exactly num_words, relation"),
        (line(instruction_id_list=["punctuation:no_comma"]), "unknown: relation, num_words", "no kwargs"),
        (line(kwargs=[{**WORDS, "relation": "at most"}]), "relation is 'at most'", "less than, at least"),
        (line(kwargs=[{**WORDS, "num_words": 0}]), "num_words is 0", "at least 1"),
        (line(kwargs=[{**WORDS, "num_words": True}]), "num_words is True", "whole number"),
    ],
)  # fmt: skip
def test_bad_row_names_file_and_line(tmp_path: Path, text: str, message: str, allowed: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line(key=1)}\n{text}\n", encoding="utf-8")
    with pytest.raises(DataError) as raised:
        load_rows(path)
    assert raised.value.message.startswith(f"{path}:2: ")
    assert message in raised.value.message
    assert allowed in (raised.value.allowed or "")


def test_bad_values_of_kwargs() -> None:
    for instruction_id, kwargs in (
        ("keywords:existence", {"keywords": []}),
        ("keywords:existence", {"keywords": "word"}),
        ("keywords:forbidden_words", {"forbidden_words": ["a", " "]}),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}),
        ("language:response_language", {"language": "xx"}),
        ("startend:end_checker", {"end_phrase": "  "}),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
        ),
    ):
        with pytest.raises(DataError, match="row with key 5") as raised:
            Row(5, "Write.", [instruction_id], [kwargs])
        assert raised.value.allowed


def test_similar_instruction_is_suggested() -> None:
    with pytest.raises(DataError) as raised:
        Row(5, "Write.", ["punctuation:no_commas"], [{}])
    assert raised.value.hint == "did you mean punctuation:no_comma?"


def test_key_twice_and_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line()}\n{line()}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: row with key 7 is there twice"):
        load_rows(path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="no rows"):
        load_rows(path)
    with pytest.raises(DataError, match="there is no file"):
        load_rows(tmp_path / "missing.jsonl")


@pytest.mark.skipif(not PROMPTS.exists(), reason="the published prompts are not here")
def test_published_prompts_are_right() -> None:
    rows = load_rows(PROMPTS)
    assert len(rows) == 541
    assert {name for row in rows for name in row.instruction_id_list} == set(VERIFIERS)
