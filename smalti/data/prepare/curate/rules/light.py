"""Two mild presets for small, hand-picked corpora, of which Gopher's minimum of 50 words would drop most docstrings.

The thresholds are at the extremes of the standard library of Python 3.11 (measured on 504 code files and 523 texts of
prose): they drop stubs, tables, generated lists and what is not text.
"""

from smalti.data.prepare.curate.rules.measure import (
    Text,
    alphabetic_frac,
    frac,
    mean_word_length,
    repeated_line_characters_frac,
)
from smalti.data.prepare.curate.rules.rule import Preset, Rule


def _mean_line(text: Text) -> float:
    return frac(sum(map(len, text.full_lines)), len(text.full_lines))


def _longest_line(text: Text) -> float:
    return max(map(len, text.lines))


def _visible(text: Text) -> int:
    return sum(map(len, text.words))


def _alphanumeric_frac(text: Text) -> float:
    return frac(sum(map(str.isalnum, text.text)), _visible(text))


def _digit_frac(text: Text) -> float:
    return frac(sum(map(str.isdecimal, text.text)), _visible(text))


# Measured on docstrings and topics: words at the 5th percentile 11, mean word length 3.5 to 8.0 but for stubs, share of
# words with a letter at the 1st percentile 0.78 (tables are below 0.7), repeated lines at most 0.33.
PROSE_LIGHT = Preset(
    "prose-light",
    "ours, for docstrings and other short prose",
    (
        Rule("words", "words", lambda text: text.tokens.words, 10, 1_000_000),
        Rule("mean-word-length", "mean characters in a word", mean_word_length, 2.5, 12),
        Rule("alphabetic-word-frac", "share of words with a letter", lambda text: alphabetic_frac(text.words), low=0.7),
        Rule(
            "repeated-line-characters",
            "share of characters in lines seen before",
            repeated_line_characters_frac,
            high=0.3,
        ),
    ),
)

# Line lengths: Codex (Chen et al. 2021, arXiv 2107.03374, section 3.1); alphanumeric share: The Stack (Kocetkov et al.
# 2022, arXiv 2211.15533). Digits: 90 % of the files are below 0.1, the tables of the codecs between 0.1 and 0.21;
# repeated lines: at most 0.44 in what people wrote.
CODE_LIGHT = Preset(
    "code-light",
    "ours, with line lengths of Codex and the alphanumeric share of The Stack",
    (
        Rule("lines", "lines that are not blank", lambda text: len(text.full_lines), 3, 100_000),
        Rule("mean-line-length", "mean characters in a line", _mean_line, high=100),
        Rule("longest-line", "characters in the longest line", _longest_line, high=1000),
        Rule("alphanumeric-frac", "share of letters and digits", _alphanumeric_frac, low=0.25),
        Rule("digit-frac", "share of digits", _digit_frac, high=0.1),
        Rule(
            "repeated-line-characters",
            "share of characters in lines seen before",
            repeated_line_characters_frac,
            high=0.5,
        ),
    ),
)
