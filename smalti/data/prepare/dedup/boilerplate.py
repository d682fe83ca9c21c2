"""Leaves boilerplate, which many texts share at their beginning or end, out of the comparison.

The rules depend on texts, never on keys, and planted documents (keys from PLANTED on) change nothing for real ones.
``core`` finds what is compared of a text with boilerplate; ``to_compare`` also finds repetitive texts, which are
duplicates only of a text with the same words in the same order.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.minhash import estimate_distinct
from smalti.data.prepare.dedup.shingles import ordered_shingles, shingle_sets

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MIN_RUN_WORDS = 6
"""Minimum words of a run without a common shingle; shorter runs are edits."""
MIN_CORE_FRAC = 0.1
MAX_EDITED_FRAC = 0.25
MIN_DISTINCT_FRAC = 0.5
"""A text with a smaller share of distinct shingles is repetitive. At one half, unrelated texts of random words, all
equally frequent, reach a Jaccard similarity of 0.66."""
MIN_WORDS = 3
"""Minimum words of the shingles that decide whether a text is repetitive: prose repeats its words."""

_ESTIMATE_MARGIN = 1.4
"""Texts are counted if estimated below this times the bound: ``estimate_distinct`` has a standard error of 8.5 %."""
_CROWD_FRAC = 1 / 3
"""A document is in a crowd if in one band this share of ``boilerplate_documents`` agrees with it: two that share four
fifths of their shingles agree in a band of 5 rows with probability 0.33, and there are 28 bands."""


def crowd_size(boilerplate_documents: int) -> int:
    """Number of documents in a bucket that make a crowd."""
    return max(2, round(boilerplate_documents * _CROWD_FRAC))


def in_buckets(hashes: I64, keys: I64, least: int) -> tuple[I64, Bools]:
    """Return the distinct keys in buckets of two or more, and whether a bucket of each has ``least`` real documents.

    A bucket is the rows of equal hashes.
    """
    _, bucket, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(sizes[bucket] > 1)
    real = np.bincount(bucket[rows], keys[rows] < PLANTED, minlength=len(sizes))
    distinct, number = np.unique(keys[rows], return_inverse=True)
    return distinct, np.bincount(number, real[bucket[rows]] >= least, minlength=len(distinct)) > 0


def seem_repetitive(signatures: npt.NDArray[np.uint64], texts: pa.Array, shingle_words: int) -> Bools:
    """Estimate from the MinHash signatures [texts, values] which texts may be repetitive."""
    n = n_shingles(texts, shingle_words)
    return np.asarray(estimate_distinct(signatures) < _ESTIMATE_MARGIN * MIN_DISTINCT_FRAC * n)


def to_compare(texts: pa.Array, seem: Bools, common: I64, shingle_words: int, max_core_frac: float) -> list[str | None]:
    """Return for each normalised text what is compared instead of it.

    That is its core; "" if it is repetitive and compared with no other; None if it is compared as a whole. ``seem``:
    the result of ``seem_repetitive``; ``common``: sorted hashes of common shingles, which ``boilerplate_documents`` or
    more different documents of a crowd have (equal texts count once).
    """
    replacements: list[str | None] = [None] * len(texts)
    if len(common):
        replacements = _cores(texts, common, shingle_words, max_core_frac)
    rows = [row for row, core in enumerate(replacements) if core is not None or seem[row]]
    compared = [texts[row].as_py() if replacements[row] is None else replacements[row] for row in rows]
    array = pa.array(compared, pa.large_string())
    width = max(shingle_words, MIN_WORDS)
    distinct = np.asarray(pc.list_value_length(shingle_sets(array, width)))
    is_repetitive = distinct < MIN_DISTINCT_FRAC * n_shingles(array, width)
    for row, repetitive in zip(rows, is_repetitive.tolist(), strict=True):
        replacements[row] = "" if repetitive else replacements[row]
    return replacements


def n_shingles(texts: pa.Array, shingle_words: int) -> I64:
    """Number of shingles of each normalised text, repeated ones included; 1 if it has fewer words."""
    blanks = np.asarray(pc.count_substring(texts, " ")).astype(np.int64)
    return np.maximum(blanks + 2 - shingle_words, 1)


def _cores(texts: pa.Array, common: I64, shingle_words: int, max_core_frac: float) -> list[str | None]:
    values, rows = ordered_shingles(texts, shingle_words)
    rare = ~_in_sorted(values, common)
    bounds = np.searchsorted(rows, np.arange(len(texts) + 1)).tolist()
    spans = [core(rare[start:stop], shingle_words, max_core_frac) for start, stop in pairwise(bounds)]
    return [
        None if span is None else " ".join(text.as_py().split(" ")[slice(*span)])
        for text, span in zip(texts, spans, strict=True)
    ]


def core(rare: Bools, shingle_words: int, max_core_frac: float) -> tuple[int, int] | None:
    """Return the first word and the end of the core, or None if the whole text is compared.

    ``rare``: for each shingle in order, whether it is not common. The core is the span from the first to the last run
    of MIN_RUN_WORDS or more words without a common shingle. It is compared instead of the whole text if

    - what is left out could make two documents near by itself (``max_core_frac`` is 1 - threshold),
    - it has MIN_CORE_FRAC of the words or more,
    - at least half of its shingles are rare, and
    - at most MAX_EDITED_FRAC of the shingles left out are rare.

    So pages in one frame are compared by their contents; copies of a text, edited or in different frames, as a whole.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rare, [False]]).astype(np.int8)))
    starts = edges[::2]
    stops = edges[1::2]
    within = shingle_words - 1  # words of boilerplate in the shingles at either end of a run
    long = np.flatnonzero(stops - starts >= MIN_RUN_WORDS + within)
    if not len(long):
        return None
    first = int(starts[long[0]])
    last = int(stops[long[-1]])
    n_words = len(rare) + within
    start = first + within if first else 0
    stop = last if last < len(rare) else n_words
    share = (stop - start) / n_words
    mostly_rare = rare[first:last].mean() >= 0.5
    left_out = np.concatenate([rare[:first], rare[last:]])
    if not (MIN_CORE_FRAC <= share <= max_core_frac and mostly_rare and left_out.mean() <= MAX_EDITED_FRAC):
        return None
    return start, stop


def _in_sorted(values: npt.NDArray[np.uint64], common: I64) -> Bools:
    if not len(common):
        return np.zeros(len(values), np.bool_)
    wanted = values.astype(np.int64)
    places = np.minimum(np.searchsorted(common, wanted), len(common) - 1)
    return np.asarray(common[places] == wanted)
