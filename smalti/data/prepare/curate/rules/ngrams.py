"""The repeated n-grams of a text, in numpy."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class _Repeated(NamedTuple):
    """The n-grams that occur more than once, for one n."""

    places: I64
    """Of their first words, in order."""
    numbers: I64
    """Equal n-grams have equal numbers."""
    counts: I64
    """How often each of them occurs."""


class Ngrams:
    """The n-grams of words. Those of n + 1 words are looked for only where two of n words are repeated.

    The characters of an n-gram are those of its words and n - 1 blanks.
    """

    def __init__(self, words: Sequence[str]) -> None:
        number_of: defaultdict[str, int] = defaultdict(count().__next__)
        self._words: I64 = np.fromiter(map(number_of.__getitem__, words), np.int64, len(words))
        self._n_words = len(number_of)
        self._ends: I64 = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)) + 1, out=self._ends[1:])
        counts = np.bincount(self._words, minlength=1)[self._words]
        places = np.flatnonzero(counts > 1)
        self._repeated = [_Repeated(places, self._words[places], counts[places])]

    def top_characters(self, n: int) -> int:
        """Return the characters of the most frequent n-gram (of ties the first) times its count; 0 without any."""
        if len(self._words) < n:
            return 0
        repeated = self._of(n)
        if not len(repeated.places):
            return self._characters(0, n)
        first = repeated.counts.argmax()
        return int(repeated.counts[first]) * self._characters(int(repeated.places[first]), n)

    def repeated_characters(self, n: int) -> int:
        """Count characters in n-grams that occurred before, each once (Gopher, table A1: 'without overlap')."""
        repeated = self._of(n)
        seen: set[int] = set()
        total = start = 0
        for place, number in zip(repeated.places.tolist(), repeated.numbers.tolist(), strict=True):
            if place < start:
                continue
            if number in seen:
                total += self._characters(place, n)
                start = place + n
            else:
                seen.add(number)
        return total

    def _characters(self, place: int, n: int) -> int:
        """Return the characters of the n-gram that begins with the word at ``place``."""
        return int(self._ends[place + n] - self._ends[place] - 1)

    def _of(self, n: int) -> _Repeated:
        """Return the repeated n-grams."""
        while len(self._repeated) < n:
            shorter, width = self._repeated[-1], len(self._repeated)
            is_followed = np.zeros(len(shorter.places), bool)
            is_followed[:-1] = shorter.places[1:] == shorter.places[:-1] + 1
            places = shorter.places[is_followed]
            self._repeated.append(
                _repeated(places, shorter.numbers[is_followed] * self._n_words + self._words[places + width])
            )
        return self._repeated[n - 1]


def _repeated(places: I64, keys: I64) -> _Repeated:
    """Return the places whose key another place has too."""
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    of_place = counts[numbers]
    is_repeated = of_place > 1
    return _Repeated(places[is_repeated], numbers[is_repeated], of_place[is_repeated])
