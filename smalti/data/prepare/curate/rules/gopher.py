"""Gopher's quality and repetition rules (Rae et al. 2021, arXiv 2112.11446, section A.1.1 and table A1).

Words are cut by a regular expression and not by a tokenizer of nltk or spaCy, so counts may differ slightly from other
implementations; the thresholds are the paper's.
"""

import re
from collections.abc import Callable

from smalti.data.prepare.curate.rules.measure import (
    Text,
    frac,
    mean_word_length,
    repeated_line_characters_frac,
)
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_STOP_WORDS = {
    word: re.compile(rf"{word}(?!\w)(?!['’\-]\w)(?<!\w{word})(?<!\w['’\-]{word})")  # noqa: RUF001
    for word in ("the", "be", "to", "of", "and", "that", "have", "with")
}
"""Each with a pattern that finds it where it is a token; it begins with the word, so that the search is fast."""
_ELLIPSES = ("...", "…")
_BULLETS = ("•", "‣", "▪", "●", "◦", "- ", "* ", "+ ")


def _hash_frac(text: Text) -> float:
    return frac(text.text.count("#"), text.tokens.words)


def _ellipsis_frac(text: Text) -> float:
    return frac(sum(text.text.count(mark) for mark in _ELLIPSES), text.tokens.words)


def _bullet_line_frac(text: Text) -> float:
    return frac(sum(f"{line.strip()} ".startswith(_BULLETS) for line in text.full_lines), len(text.full_lines))


def _ellipsis_line_frac(text: Text) -> float:
    return frac(sum(line.rstrip().endswith(_ELLIPSES) for line in text.full_lines), len(text.full_lines))


def _stop_words(text: Text) -> float:
    lower = text.text.replace("İ", "ı").lower()  # noqa: RUF001  (its small letter would be two, of which one is no letter)
    return sum(pattern.search(lower) is not None for pattern in _STOP_WORDS.values())


QUALITY = Preset(
    "gopher-2021",
    "Rae et al. 2021, arXiv 2112.11446, A.1.1",
    (
        Rule("words", "words", lambda text: text.tokens.words, 50, 100_000),
        Rule("mean-word-length", "mean characters in a word", mean_word_length, 3, 10),
        Rule("hash-frac", "'#' for each word", _hash_frac, high=0.1),
        Rule("ellipsis-frac", "ellipses for each word", _ellipsis_frac, high=0.1),
        Rule("bullet-line-frac", "share of lines that start with a bullet", _bullet_line_frac, high=0.9),
        Rule("ellipsis-line-frac", "share of lines that end in an ellipsis", _ellipsis_line_frac, high=0.3),
        Rule(
            "alphabetic-word-frac",
            "share of words with a letter",
            lambda text: frac(text.tokens.alphabetic_words, text.tokens.words),
            low=0.8,
        ),
        Rule("stop-words", "distinct words of {the be to of and that have with}", _stop_words, low=2, english=True),
    ),
)


def _top(n: int) -> Callable[[Text], float]:
    return lambda text: frac(text.ngrams.top_characters(n), len(text.text))


def _repeated(n: int) -> Callable[[Text], float]:
    return lambda text: frac(text.ngrams.repeated_characters(n), len(text.text))


_TOP_LIMITS = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED_LIMITS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))

REPETITION = Preset(
    "gopher-repetition-2021",
    "Rae et al. 2021, arXiv 2112.11446, table A1",
    (
        Rule(
            "repeated-line-frac",
            "share of lines seen before",
            lambda t: frac(t.repeated_lines[0], len(t.full_lines)),
            high=0.30,
        ),
        Rule(
            "repeated-paragraph-frac",
            "share of paragraphs seen before",
            lambda t: frac(t.repeated_paragraphs[0], len(t.paragraphs)),
            high=0.30,
        ),
        Rule(
            "repeated-line-characters",
            "share of characters in lines seen before",
            repeated_line_characters_frac,
            high=0.20,
        ),
        Rule(
            "repeated-paragraph-characters",
            "share of characters in paragraphs seen before",
            lambda t: frac(t.repeated_paragraphs[1], len(t.text)),
            high=0.20,
        ),
        *(
            Rule(f"top-{n}-gram", f"share of characters in the most frequent {n}-gram", _top(n), high=limit)
            for n, limit in _TOP_LIMITS
        ),
        *(
            Rule(f"repeated-{n}-grams", f"share of characters in {n}-grams seen before", _repeated(n), high=limit)
            for n, limit in _REPEATED_LIMITS
        ),
    ),
)
