"""The repeated n-grams of a text, in numpy."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Ngrams:
    """The n-grams of words, by number: equal n-grams have equal numbers, for each n from 0 on without gaps.

    The characters of an n-gram are those of its words and n - 1 blanks.
    """

    def __init__(self, words: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        self._words: I64 = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
        self._n_words = len(numbers)
        self._ends: I64 = np.array([0, *accumulate(len(word) + 1 for word in words)], np.int64)
        self._numbers: list[I64] = [self._words]
        self._are_distinct = len(numbers) == len(words)

    def top_characters(self, n: int) -> int:
        """Return the characters of the most frequent n-gram (of ties the first) times its count; 0 without any."""
        numbers, characters = self._of(n), self._characters(n)
        if not len(characters):
            return 0
        if numbers is None:
            return int(characters[0])
        counts = np.bincount(numbers)[numbers]
        first = counts.argmax()
        return int(counts[first] * characters[first])

    def repeated_characters(self, n: int) -> int:
        """Count characters in n-grams that occurred before, each once (Gopher, table A1: 'without overlap')."""
        numbers = self._of(n)
        if numbers is None:
            return 0
        characters, sequence = self._characters(n), numbers.tolist()
        is_later = np.ones(len(numbers), bool)
        is_later[np.unique(numbers, return_index=True)[1]] = False
        seen: set[int] = set()
        total = start = 0
        for place in np.flatnonzero(is_later).tolist():
            if place < start:
                continue
            seen.update(sequence[start:place])
            start = place
            if sequence[place] in seen:  # its first one may be inside of another that was counted
                total += int(characters[place])
                start += n
        return total

    def _characters(self, n: int) -> I64:
        """Return the characters of each n-gram."""
        return self._ends[n:] - self._ends[:-n] - 1

    def _of(self, n: int) -> I64 | None:
        """Return the number of each n-gram; None: all differ, and so do longer ones."""
        while len(self._numbers) < n and not self._are_distinct:
            shorter, width = self._numbers[-1], len(self._numbers)
            pairs = shorter[:-1] * self._n_words + self._words[width:]
            distinct, numbers = np.unique(pairs, return_inverse=True)
            self._numbers.append(numbers)
            self._are_distinct = len(distinct) == len(pairs)
        if self._are_distinct and n >= len(self._numbers):
            return None
        return self._numbers[n - 1]
