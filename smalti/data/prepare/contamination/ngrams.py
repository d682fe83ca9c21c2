"""Hashes of the word n-grams of texts, and sets of them. Case, punctuation and layout do not matter.

Words are those that near-duplicates are compared by (``dedup/words.py``). The same text gives the same hashes on every
machine. An n-gram of 10^12 words that is none of a million wanted ones is taken for one with probability 0.1.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.base.hashing import sha256_bytes
from smalti.data.prepare.daft_engine import daft_module
from smalti.data.prepare.dedup.shingles import mix, word_hashes
from smalti.data.prepare.dedup.words import words_of

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

SHORT = 8
LONG = 13
VERSION = 1
"""Version of the words and their hashes; another one makes stored indexes invalid."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LONG_BIT = np.uint64(1)
_TABLE_BITS_OF_NGRAM = 5
_MAX_TABLE_BITS = 28


def normalised(texts: pa.Array) -> pa.Array:
    """Return the words of each text, joined by blanks. The caller limits the size of a call."""
    daft = daft_module("the contamination check")
    rows = daft.recordbatch.RecordBatch.from_pydict({"text": daft.Series.from_arrow(texts.cast(pa.large_string()))})
    projection = daft.expressions.ExpressionsProjection([words_of(daft.col("text"), daft.functions)])
    return rows.eval_expression_list(projection).get_column(0).to_arrow()


def ngrams(words: U64, text_of_word: I64) -> tuple[tuple[U64, I64], tuple[U64, I64]]:
    """Return (hashes, number of the first word) of the 8-grams and of the 13-grams inside each text.

    Args:
        words: Hashes of the words of all texts.
        text_of_word: The text of each word, ascending.
    """
    short = values = _extend(np.zeros(max(len(words) - SHORT + 1, 0), np.uint64), words, 0, SHORT)
    values = _extend(values[: max(len(words) - LONG + 1, 0)], words, SHORT, LONG)
    return (
        _inside(mix(short) & ~_LONG_BIT, text_of_word, SHORT),
        _inside(mix(values) | _LONG_BIT, text_of_word, LONG),
    )


def is_long(hashes: U64) -> npt.NDArray[np.bool_]:
    """Return which hashes are of 13-grams."""
    return np.asarray((hashes & _LONG_BIT) == _LONG_BIT)


def _extend(values: U64, words: U64, start: int, stop: int) -> U64:
    """Return the polynomials of n-grams with the words ``start`` to ``stop`` of each added."""
    for offset in range(start, stop):
        values = values * _FACTOR + words[offset : offset + len(values)]
    return values


def _inside(hashes: U64, text_of_word: I64, width: int) -> tuple[U64, I64]:
    """Leave out the n-grams that begin in one text and end in another."""
    first = np.flatnonzero(text_of_word[: len(hashes)] == text_of_word[width - 1 :][: len(hashes)])
    return hashes[first], first


class NgramSet:
    """A set of hashes of n-grams, as fast to ask for those in it as numpy allows. Not changed."""

    def __init__(self, hashes: U64) -> None:
        hashes = np.sort(hashes)  # np.unique hashes them, which takes 7 times as long
        self.hashes = hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]
        self.digest = sha256_bytes(self.hashes.tobytes())
        # A table of a part of the bits answers for nearly all n-grams of a corpus: a binary search in millions is slow.
        n_bits = min(len(self.hashes).bit_length() + _TABLE_BITS_OF_NGRAM, _MAX_TABLE_BITS)
        self._shift = np.uint64(64 - n_bits)
        self._table = np.zeros(1 << n_bits, np.bool_)
        self._table[self.hashes >> self._shift] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def places(self, hashes: U64) -> I64:
        """Return the places of those of ``hashes`` that are in the set."""
        maybe = np.flatnonzero(self._table[hashes >> self._shift])
        if not len(self.hashes) or not len(maybe):
            return maybe[:0]
        candidates = hashes[maybe]
        at = np.minimum(np.searchsorted(self.hashes, candidates), len(self.hashes) - 1)
        return np.asarray(maybe[self.hashes[at] == candidates])

    def find(self, texts: pa.Array) -> tuple[U64, I64]:
        """Return each n-gram of the set that is in a text of normalised ``texts``, and the row of the text.

        Rows may be repeated.
        """
        words, text_of_word = word_hashes(texts)
        matches = [
            (values[places], first[places])
            for values, first in ngrams(words, text_of_word)
            for places in [self.places(values)]
        ]
        first = np.concatenate([first for _, first in matches])
        return np.concatenate([values for values, _ in matches]), text_of_word[first]
