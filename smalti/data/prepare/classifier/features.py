"""Hashed n-grams of a text: words, pairs of words, and spans of 3 and 5 bytes. The same on every machine.

All hashes of a text come from prefix sums of a polynomial in a number that is odd, so invertible modulo 2^64: a text
takes a fixed number of passes over its bytes, and no loop over its words.
"""

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

BITS = 20
"""Of the number of weights."""
MAX_BYTES = 20_000
"""Only the beginning of a text is read."""
VERSION = 1
"""Of the features; another one makes stored classifiers invalid."""

_BASE = 0x9E3779B97F4A7C15
_SPANS = (3, 5)
_UPPER_TO_LOWER = np.arange(256, dtype=np.uint8)
_UPPER_TO_LOWER[65:91] += 32
_IS_WORD = np.zeros(256, np.bool_)
_IS_WORD[[*range(48, 58), *range(97, 123), *range(128, 256)]] = True


def _powers(base: int) -> U64:
    powers = np.full(MAX_BYTES + 1, base % 2**64, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS, _INVERSE_POWERS = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def features(text: str) -> U32:
    """Return the sorted, distinct buckets of the n-grams of ``text``, below 2^BITS. ASCII capitals do not matter."""
    data = _UPPER_TO_LOWER[np.frombuffer(text[:MAX_BYTES].encode()[:MAX_BYTES], np.uint8)]
    n = len(data)
    prefix = np.zeros(n + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * _INVERSE_POWERS[:n], out=prefix[1:])
    is_word = np.zeros(n + 2, np.int8)
    is_word[1:-1] = _IS_WORD[data]
    edges = np.flatnonzero(np.diff(is_word))
    begins, ends = edges[::2], edges[1::2]
    words = (prefix[ends] - prefix[begins]) * _POWERS[begins]
    pairs = words[:-1] * np.uint64(31) + words[1:]
    spans = [(prefix[size:] - prefix[:-size]) * _POWERS[: n + 1 - size] for size in _SPANS if n >= size]
    parts = [_buckets(values, salt) for salt, values in enumerate((words, pairs, *spans))]
    return np.unique(np.concatenate(parts))


def _buckets(values: U64, salt: int) -> U32:
    mixed = (values ^ (values >> np.uint64(29)) ^ np.uint64(salt)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(64 - BITS)).astype(np.uint32)
