"""Strict and loose grades of rows, and the four accuracies."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ifeval_examples import Examples
from test_ifeval_layout import EXAMPLES as LAYOUT
from test_ifeval_lengths import EXAMPLES as LENGTHS
from test_ifeval_wording import EXAMPLES as WORDING

from smalti.base.errors import UserError
from smalti.evals.graders.ifeval.grading import Grade, grade, loose_variants, summarize
from smalti.evals.graders.ifeval.rows import Row
from smalti.evals.graders.ifeval.verifiers import VERIFIERS
from smalti.evals.statistics.intervals import wilson_interval

EXAMPLES: dict[str, list[Examples]] = LAYOUT | LENGTHS | WORDING
FRAGMENTS = [
    "one", "Two.", "THREE!", "\n", "\n\n", " ", "*", "***", "******", "- ", "* ", '"', "[a]", "<<t>>", ",", "P.S. x",
    "{}",
    "Section 1", "My answer is yes.", "e.g. ", "1. ", "```", "是。", "है।", "I'm", "the and of",
]  # fmt: skip


def row(*instructions: tuple[str, dict[str, Any]]) -> Row:
    return Row(1, "Write.", [name for name, _ in instructions], [kwargs for _, kwargs in instructions])


def test_every_verifier_has_examples() -> None:
    assert set(EXAMPLES) == set(VERIFIERS)


def test_eight_variants() -> None:
    variants = loose_variants("first *a*\nmiddle *b*\nlast *c*")
    assert variants == [
        "middle *b*\nlast *c*",
        "first *a*\nmiddle *b*",
        "middle *b*",
        "first a\nmiddle b\nlast c",
        "middle b\nlast c",
        "first a\nmiddle b",
        "middle b",
    ]


def test_loose_passes_what_a_line_or_asterisks_spoil() -> None:
    quoted = row(("startend:quotation", {}), ("punctuation:no_comma", {}))
    first, second = grade(quoted, 'Sure, here it is:\n*"My answer"*')
    assert first == {
        "instruction_id": "startend:quotation",
        "strict": {"official": False, "fixed": False},
        "loose": {"official": True, "fixed": True},
    }
    assert second["strict"] == {"official": False, "fixed": False}
    assert second["loose"] == {"official": True, "fixed": True}


@pytest.mark.parametrize("response", ["", " \n\t", "\n\n\n"])
def test_blank_response_follows_nothing(response: str) -> None:
    for instruction_id, groups in EXAMPLES.items():
        (result,) = grade(row((instruction_id, groups[0].kwargs)), response)
        assert not any([*result["strict"].values(), *result["loose"].values()])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(VERIFIERS)),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=8)), max_size=14).map("".join),
)
def test_strict_pass_implies_loose_pass(instruction_id: str, response: str) -> None:
    (result,) = grade(row((instruction_id, EXAMPLES[instruction_id][0].kwargs)), response)
    assert result["loose"]["official"] >= result["strict"]["official"]
    assert result["loose"]["fixed"] >= result["strict"]["fixed"]


def graded(strict: list[tuple[bool, bool]]) -> list[Grade]:
    return [
        {
            "instruction_id": "x",
            "strict": {"official": official, "fixed": fixed},
            "loose": {"official": True, "fixed": fixed},
        }
        for official, fixed in strict
    ]


def test_accuracies_of_prompts_and_instructions() -> None:
    scores = summarize([graded([(True, True)]), graded([(True, False), (False, False), (True, True)])])
    assert {name: (score["value"], score["n"]) for name, score in scores["official"].items()} == {
        "prompt_strict": (0.5, 2),
        "instruction_strict": (0.75, 4),
        "prompt_loose": (1.0, 2),
        "instruction_loose": (1.0, 4),
    }
    assert (scores["fixed"]["prompt_strict"]["value"], scores["fixed"]["instruction_loose"]["value"]) == (0.5, 0.5)
    assert scores["official"]["instruction_strict"]["clusters"] == 2  # instructions of a prompt are dependent
    assert scores["official"]["prompt_strict"]["interval"] == list(wilson_interval(1, 2))
    with pytest.raises(UserError, match="no grades"):
        summarize([])
