"""Finds held-out documents that are in training text: by name, by text, by their passages of 13 words."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.base.hashing import xxh3
from smalti.data.prepare.contamination.ngrams import I64, NgramSet, ngrams, normalised
from smalti.data.prepare.dedup.shingles import word_hashes

SHARED_FRAC = 0.2
"""A held-out document of which more 13-grams than this are in training text is a near copy. Of a copy with one word in
twenty changed about half are."""
_BATCH = 256


class Leaks:
    """Held-out documents, and which of them training text has.

    Memory: 16 bytes for each word of the held-out documents.
    """

    def __init__(self, names: Sequence[str | None], texts: Sequence[str]) -> None:
        """``names``: source and id of each document; None: it has no name that training documents could have."""
        self._names: dict[str, list[int]] = {}
        self._texts: dict[int, list[int]] = {}
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            if name is not None:
                self._names.setdefault(name, []).append(number)
            self._texts.setdefault(_text_key(text), []).append(number)
        self._is_copy = np.zeros(len(texts), np.bool_)
        values, documents = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for start in range(0, len(texts), _BATCH):
            words, text_of_word = word_hashes(_normalised(texts[start : start + _BATCH]))
            hashes, first = ngrams(words, text_of_word)[1]
            values.append(hashes)
            documents.append(text_of_word[first] + start)
        self._values, self._documents = np.concatenate(values), np.concatenate(documents)
        self._ngrams = NgramSet(self._values)
        self._shared = np.zeros(len(self._ngrams), np.bool_)
        self._pending: list[str] = []

    def add(self, name: str, text: str, *, is_read: bool) -> None:
        """Compare a training document; ``is_read``: its text is trained on, so its passages count too."""
        for number in (*self._names.get(name, ()), *self._texts.get(_text_key(text), ())):
            self._is_copy[number] = True
        if is_read:
            self._pending.append(text)
            if len(self._pending) == _BATCH:
                self._find()

    def result(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return two masks of held-out documents: those that are training documents, and other near copies of some."""
        self._find()
        n = len(self._is_copy)
        total = np.bincount(self._documents, minlength=n)
        shared = np.bincount(self._documents, self._shared[self._places(self._values)], minlength=n)
        return self._is_copy, ~self._is_copy & (shared > SHARED_FRAC * total)

    def _find(self) -> None:
        if self._pending and len(self._ngrams):
            hashes, _ = self._ngrams.find(_normalised(self._pending))
            self._shared[self._places(hashes)] = True
        self._pending = []

    def _places(self, hashes: npt.NDArray[np.uint64]) -> I64:
        return np.asarray(np.searchsorted(self._ngrams.hashes, hashes))


def _normalised(texts: Sequence[str]) -> pa.Array:
    return normalised(pa.array(texts, pa.large_string()))


def _text_key(text: str) -> int:
    return xxh3(" ".join(text.split()).encode())
