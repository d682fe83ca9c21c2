"""Measures of a text that several rules use."""

import re
from collections.abc import Sequence
from functools import cached_property

from smalti.data.documents.characters import Characters, count
from smalti.data.prepare.curate.rules.ngrams import Ngrams
from smalti.data.prepare.curate.rules.tokens import TokenCounts, count_tokens

_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_PARAGRAPHS = re.compile(r"\n{2,}")


class Text:
    """A text and its parts; each property is computed once, on first use."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """All lines, blank ones too; at least one."""
        return self.text.split("\n")

    @cached_property
    def full_lines(self) -> list[str]:
        """Lines that are not blank."""
        return [line for line in self.lines if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Text between blank lines."""
        text = self.text.strip()
        return [part for part in (_PARAGRAPHS.split(text) if "\n\n" in text else (text,)) if part]

    @cached_property
    def words(self) -> list[str]:
        """Words, split at white space."""
        return self.text.split()

    @cached_property
    def characters(self) -> Characters:
        """Numbers of characters by class."""
        return count(self.text)

    @cached_property
    def ngrams(self) -> Ngrams:
        """The n-grams of ``words``."""
        return Ngrams(self.words)

    @cached_property
    def tokens(self) -> TokenCounts:
        """Numbers of words and single symbols: ``don't stop!`` has ``don't``, ``stop`` and ``!``."""
        return count_tokens(self.text)

    @cached_property
    def repeated_lines(self) -> tuple[int, int]:
        """Number of lines that occurred before, and their characters; blank lines do not count."""
        return repeats(self.full_lines)

    @cached_property
    def repeated_paragraphs(self) -> tuple[int, int]:
        """Number of paragraphs that occurred before, and their characters."""
        return repeats(self.paragraphs)


def frac(part: float, whole: float) -> float:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0


def mean_word_length(text: Text) -> float:
    """Return the mean number of characters of the tokens that are not symbols."""
    return frac(text.tokens.word_characters, text.tokens.words)


def alphabetic_frac(words: Sequence[str]) -> float:
    """Return the share of words with a letter."""
    return frac(sum(word.isalpha() or any(map(str.isalpha, word)) for word in words), len(words))


def repeated_line_characters_frac(text: Text) -> float:
    """Return the share of characters in lines that occurred before."""
    return frac(text.repeated_lines[1], len(text.text))


def count_sentences(line: str) -> int:
    """Number of sentences in a non-empty line, by their end marks; at least 1."""
    return max(1, len(_SENTENCE_END.findall(line)))


def repeats(items: Sequence[str]) -> tuple[int, int]:
    """Number of items that occurred before, and the sum of their characters."""
    if len(set(items)) == len(items):
        return 0, 0
    seen: set[str] = set()
    count = characters = 0
    for item in items:
        if item in seen:
            count += 1
            characters += len(item)
        seen.add(item)
    return count, characters
