"""Sets of shingles of normalised texts, and the similarities of pairs of sets, for whole batches in numpy.

A shingle is ``shingle_words`` consecutive words; a text with fewer words, and at least one, is one shingle. The same
text gives the same set on every machine. Jaccard and containment are exact up to collisions of 52-bit hashes (one
false agreement in 10^9 pairs of documents of 1,000 words).
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_ROWS = 4096
"""Limit on the rows of one call: hash and row number of a shingle share 64 bits."""

_HASH_BITS = 52
HASHES = 1 << _HASH_BITS
"""Bound on the hashes of shingles."""
_MASK = np.uint64((1 << _HASH_BITS) - 1)
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)
_SPACE = 32
_PIECE_BYTES = 1 << 17


def shingle_sets(texts: pa.Array, shingle_words: int) -> pa.LargeListArray:
    """Return the sorted distinct hashes of the shingles of each text. Words are separated by blanks.

    An empty text has an empty set. At most MAX_ROWS texts.
    """
    values, rows = ordered_shingles(texts, shingle_words)
    keyed = np.sort((rows.astype(np.uint64) << np.uint64(_HASH_BITS)) | values)
    if len(keyed):
        keyed = keyed[np.concatenate([[True], keyed[1:] != keyed[:-1]])]
    counts = np.bincount((keyed >> np.uint64(_HASH_BITS)).astype(np.int64), minlength=len(texts))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array((keyed & _MASK).astype(np.int64)))


def ordered_shingles(texts: pa.Array, shingle_words: int) -> tuple[U64, I64]:
    """Return the hash of every shingle and the row of its text, in the order of texts and words."""
    assert len(texts) <= MAX_ROWS, len(texts)
    words, text_of_word = word_hashes(texts)
    values, rows = _hash_shingles(words, text_of_word, len(texts), shingle_words)
    return values & _MASK, rows


def word_hashes(texts: pa.Array) -> tuple[U64, I64]:
    """Return the 64-bit hash of every word and the row of its text, in order. Words are separated by blanks."""
    data, ends = _bytes_of(texts)
    starts_of_words, ends_of_words, text_of_word = _words(data, ends)
    return _hash_words(data, starts_of_words, ends_of_words), text_of_word


def shared(first: pa.LargeListArray, second: pa.LargeListArray) -> tuple[I64, I64, I64]:
    """Return for each row the number of shingles in both sets, the size of the first, and the size of the second.

    Sets as ``shingle_sets`` makes them; at most MAX_ROWS rows.
    """
    keyed_first, sizes_first = _keyed(first)
    keyed_second, sizes_second = _keyed(second)
    # Each side is sorted, so the stable sort merges two runs: 5 ns a shingle.
    both = np.sort(np.concatenate([keyed_first, keyed_second]), kind="stable")
    equal = both[1:][both[1:] == both[:-1]] >> np.uint64(_HASH_BITS)
    return np.bincount(equal.astype(np.int64), minlength=len(first)), sizes_first, sizes_second


def similarities(
    common: I64, sizes_first: I64, sizes_second: I64
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the Jaccard similarity, and the containment of the smaller set in the larger; 0 if a set is empty."""
    union = sizes_first + sizes_second - common
    smaller = np.minimum(sizes_first, sizes_second)
    return common / np.maximum(union, 1), common / np.maximum(smaller, 1)


def _keyed(sets: pa.LargeListArray) -> tuple[U64, I64]:
    assert len(sets) <= MAX_ROWS, len(sets)
    offsets = np.asarray(sets.offsets)
    sizes = np.diff(offsets)
    values = np.asarray(sets.values)[offsets[0] : offsets[-1]].astype(np.uint64)
    rows = np.repeat(np.arange(len(sets), dtype=np.uint64), sizes)
    return (rows << np.uint64(_HASH_BITS)) | values, sizes


def _bytes_of(texts: pa.Array) -> tuple[npt.NDArray[np.uint8], I64]:
    """Return the UTF-8 of all texts, each followed by a blank, and the positions of these blanks."""
    joined = pc.binary_join_element_wise(texts, pa.scalar("", texts.type), pa.scalar(" ", texts.type))
    _, offsets, data = joined.cast(pa.large_string()).buffers()
    places = np.frombuffer(offsets, np.int64)[joined.offset : joined.offset + len(joined) + 1]
    whole = np.frombuffer(data, np.uint8)[places[0] : places[-1]] if data is not None else np.empty(0, np.uint8)
    return whole, places[1:] - places[0] - 1


def _words(data: npt.NDArray[np.uint8], ends: I64) -> tuple[I64, I64, I64]:
    """Return first byte, end and row of each word."""
    blanks = np.flatnonzero(data == _SPACE)
    starts = np.concatenate([[0], blanks[:-1] + 1]) if len(blanks) else np.empty(0, np.int64)
    real = blanks > starts
    starts = starts[real]
    stops = blanks[real]
    return starts, stops, np.searchsorted(ends, starts)


def _hash_words(data: npt.NDArray[np.uint8], starts: I64, stops: I64) -> U64:
    """Hash each word, in pieces of the data that fit into a cache."""
    pieces = np.flatnonzero(np.diff(starts // _PIECE_BYTES, prepend=-1, append=-2))
    values = [
        hash_spans(data[starts[a] : stops[b - 1]] + np.uint64(1), starts[a:b] - starts[a], stops[a:b] - starts[a])
        for a, b in pairwise(pieces.tolist())
    ]
    return np.concatenate(values) if values else np.empty(0, np.uint64)


def hash_spans(values: U64, starts: I64, stops: I64) -> U64:
    """Hash each span of ``values`` by a polynomial modulo 2^64, from prefix sums: no loop over spans.

    Spans may overlap. A hash does not depend on where its span begins.
    """
    if not len(values):
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        sums = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values * _powers(_BASE, len(values)), out=sums[1:])
        # Multiplied by the inverse power of its start, the sum of a span does not depend on its position.
        hashes = (sums[stops] - sums[starts]) * _powers(_INVERSE, len(values))[starts]
        return mix(hashes + (stops - starts).astype(np.uint64))


def _powers(base: int, n: int) -> U64:
    if n <= _PIECE_BYTES:
        return _first_powers(base)[:n]
    return _new_powers(base, n)  # a piece that ends with a very long word


@lru_cache(maxsize=2)
def _first_powers(base: int) -> U64:
    return _new_powers(base, _PIECE_BYTES)


def _new_powers(base: int, n: int) -> U64:
    factors = np.full(n, np.uint64(base))
    factors[0] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(factors)


def _hash_shingles(words: U64, text_of_word: I64, n_texts: int, shingle_words: int) -> tuple[U64, I64]:
    """Return the hash and the text of every shingle."""
    counts = np.bincount(text_of_word, minlength=n_texts)
    firsts = np.cumsum(counts) - counts
    lengths = np.minimum(counts, shingle_words)  # short texts: one shingle of all words
    place = np.arange(len(words)) - firsts[text_of_word]
    begins = np.flatnonzero(place <= (counts - lengths)[text_of_word])
    rows = text_of_word[begins]
    width = lengths[rows]
    values = np.zeros(len(begins), np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(shingle_words):
            inside = width > offset
            if inside.all():
                values = mix(values * np.uint64(_BASE) + words[begins + offset])
            else:
                next_words = words[begins[inside] + offset]
                values[inside] = mix(values[inside] * np.uint64(_BASE) + next_words)
    return values, rows


def mix(x: U64) -> U64:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
