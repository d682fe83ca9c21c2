"""Graders of generated answers: LLM Foundry's rule with its defects, and the exact one without them."""

import pytest

from smalti.evals.graders.answers import as_published, exact, leading_number, normalized, number
from smalti.evals.graders.baselines import majority, permuted

COT = {"delimiter": "The answer is ", "stop": ("\n\n", "Question:"), "normalize": False}
PLAIN = {"delimiter": "", "stop": (), "normalize": True}


@pytest.mark.parametrize(
    ("text", "published", "corrected"),
    [
        ("5 and 13. The answer is 18", True, True),
        ("The answer is 18.", True, True),
        ("The answer is $18 a day", False, True),
        ("The answer is 180", True, False),
        ("The answer is 18.5", True, False),
        ("The answer is 18.0", True, True),
        ("18", True, False),  # without the delimiter it is not an answer
        ("The answer is 3. The answer is 18\n\nQuestion: 5 The answer is 7", True, True),
        ("The answer is ", False, False),
        ("The answer is eighteen", False, False),
    ],
)
def test_numbers_after_reasoning(text: str, published: bool, corrected: bool) -> None:
    assert as_published(text, ["18"], **COT).correct is published
    assert exact(text, ["18"], **COT).correct is corrected


@pytest.mark.parametrize(
    ("text", "published", "corrected"),
    [
        (" the Onion\nQuestion: next", True, True),
        ("An onion_", True, True),
        ("onion soup", True, False),
        ("red onion", False, False),
        ("", False, False),
        ("Allium cepa!", True, True),
    ],
)
def test_texts(text: str, published: bool, corrected: bool) -> None:
    answers = ["Onion", "allium cepa"]
    assert as_published(text, answers, **PLAIN).correct is published
    assert exact(text, answers, **PLAIN).correct is corrected


def test_an_empty_label_accepts_everything_only_as_published() -> None:
    assert normalized("The ?!") == ""
    assert as_published("whatever", ["!", "The"], **PLAIN).correct
    assert not exact("whatever", ["!", "The"], **PLAIN).correct
    assert exact("!", ["!"], **PLAIN).correct


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("1,250.50", 1250.5),
        ("$3", 3),
        ("-7", -7),
        (".5", 0.5),
        ("5%", 5),
        ("-$3", -3),
        ("$-3", -3),
        ("1,25", None),
        ("--3", None),
        ("-$-3", None),
        ("1" * 5000, None),
        ("x", None),
        ("", None),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    result = number(text)
    assert (None if result is None else float(result)) == value


@pytest.mark.parametrize(
    ("text", "correct"),
    [("7", True), ("Seven.", True), ("07 of them", True), ("8", False), ("eight", False), ("--7", False)],
)
def test_a_number_may_have_a_text_as_alias(text: str, correct: bool) -> None:
    grade = exact(text, ["7", "seven"], **PLAIN)
    assert (grade.correct, grade.parsed is None) == (correct, False)


def test_an_answer_that_is_no_number_is_not_parsed_where_all_right_ones_are() -> None:
    assert exact("blue", ["7", "07"], **PLAIN).parsed is None
    assert exact("--7", ["7"], **PLAIN).parsed is None


def test_a_number_ends_where_it_ends() -> None:
    assert leading_number("18 dollars") == 18
    assert leading_number("18, of course") == 18
    assert [leading_number(text) for text in ("18/20", "18th", "1.2.3", "x18")] == [None] * 4


def test_baselines() -> None:
    letters = [("A", "B"), ("B", "A"), ("A", "B"), ("B", "A")]
    golds = [1, 0, 1, 1]  # B, B, B, A
    always_b = [1, 0, 1, 0]
    assert permuted(letters, golds, always_b) == 0.75
    assert majority(letters, golds) == 0.75
    texts = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]
    assert majority(texts, [0, 0, 1, 0]) == 0.75
    assert permuted(texts, golds, [0, 0, 1, 1]) == 0.25 * 0.5 + 0.75 * 0.5
