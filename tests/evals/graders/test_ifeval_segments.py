"""Words, paragraphs, sentences and languages of a text."""

# ruff: noqa: RUF001 (letters and marks of other scripts are meant)

import pytest

from smalti.evals.graders.ifeval.languages import LANGUAGES, possible_languages
from smalti.evals.graders.ifeval.segments import (
    bare,
    capital_words,
    official_capital_words,
    official_sentence_count,
    paragraphs,
    sentence_count,
    word_count,
)


@pytest.mark.parametrize(
    ("text", "official", "fixed"),
    # The official counts are those of nltk 3.10.4 with its English model.
    [
        ("", 0, 0),
        ("One.", 1, 1),
        ("One. Two", 2, 2),
        ("Dr. Smith met Mrs. Jones on Jan. 3 at 5 p.m. sharp.", 1, 1),
        ("He lives in the U.S. They know.", 2, 1),
        ("Very bad acting!!! I promise.", 2, 2),
        ("Stop!!!", 2, 1),
        ('He said "Go." She went.', 2, 2),
        ("(He went.) She stayed.", 2, 2),
        ("1. One\n2. Two", 3, 1),
        ("First comes B. Then comes C. Smith.", 2, 1),
        ("Wait... then go", 1, 1),
        ("Version 3.5 is out. Get it.", 2, 2),
        ("A title\n\nA sentence. Another.", 2, 2),
        ("वह आया। वह गया।", 1, 2),
    ],
)
def test_sentences(text: str, official: int, fixed: int) -> None:
    assert (official_sentence_count(text), sentence_count(text)) == (official, fixed)


@pytest.mark.parametrize(
    ("text", "official", "fixed"),
    # The official counts are those of nltk 3.10.4.
    [
        ("NASA and ESA", 2, 2),
        ("I am", 1, 0),
        ("DON'T STOP", 3, 2),
        ("I'M HERE", 3, 2),
        ("IT’S", 2, 1),
        ("CANNOT", 2, 1),
        ("AT&T", 2, 1),
        ("A/B and WELL-KNOWN", 2, 2),
        ("U.S. A.M.", 2, 2),
        ("10:30AM, COVID-19", 2, 2),
        ("**BOLD**: «YES»", 2, 2),
        ("NASA's", 1, 1),
    ],
)
def test_capital_words(text: str, official: int, fixed: int) -> None:
    assert (official_capital_words(text), capital_words(text)) == (official, fixed)


def test_words_and_paragraphs() -> None:
    assert word_count("It's a well-known - fact: 3.5 % - यह हिन्दी") == 7
    assert [bare(word) for word in ("**Word:**", "(it's)", "_x_", "--", "हिन्दी।")] == ["Word", "it's", "x", "", "हिन्दी"]
    assert paragraphs("\n\na\nb\n \nc\n\n\n\nd\n") == ["a\nb", "c", "d"]


def test_languages() -> None:
    assert possible_languages("The cat and the dog are in the garden.") == {"en"}
    assert possible_languages("THE CAT AND THE DOG ARE IN THE GARDEN.") == {"en"}
    assert possible_languages("Maria Smith") >= {"en", "de", "vi"}
    assert possible_languages("123 !?") == frozenset()
    assert possible_languages("ᏣᎳᎩ") == frozenset()
    assert possible_languages("漢字") == {"zh-cn", "zh-tw", "ja"}
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 55
