"""What of a text is compared: what it shares with many others at its beginning and end is left out, in numpy.

Promises: the rules below and nothing else; they depend on texts, never on keys, and planted documents (keys from
PLANTED on) change nothing for real ones.

*Boilerplate*: a shingle is common where ``boilerplate_documents`` or more different documents of a crowd have it (of
equal texts one counts). The *core* of a document is what stands from its first to its last run of MIN_RUN_WORDS or more
words without a common shingle; shorter runs are edits. It is compared instead of the whole when what is left out could
make two documents near by itself (``max_core_frac`` is 1 - threshold), when it has MIN_CORE_FRAC of the words or more,
when common shingles are not the larger part of it, and not more than MAX_EDITED_FRAC of those left out are others. So
pages in one frame are compared by their contents; copies of one text, with edits or in different frames, as a whole.

*Repetitive*: a text of whose shingles (of MIN_WORDS words at least: prose repeats its words) less than
MIN_DISTINCT_FRAC are distinct. It is a duplicate only of a text with the same words in the same order. Unrelated texts
of random words, all as frequent, reach a Jaccard similarity of 0.66 at one half.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.shingles import ordered_shingles, shingle_sets

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MIN_RUN_WORDS = 6
MIN_CORE_FRAC = 0.1
MAX_EDITED_FRAC = 0.25
MIN_DISTINCT_FRAC = 0.5
MIN_WORDS = 3

_ESTIMATE_MARGIN = 1.4
"""A signature of 140 values estimates the number of distinct shingles with a standard error of 8.5 %."""
_CROWD_FRAC = 1 / 3
"""A document is in a crowd when in one band so much of ``boilerplate_documents`` agree with it: two that share four
fifths of their shingles agree in a band of 5 rows with probability 0.33, and there are 28."""


def crowd_size(boilerplate_documents: int) -> int:
    """Documents in a bucket that make a crowd."""
    return max(2, round(boilerplate_documents * _CROWD_FRAC))


def in_buckets(hashes: I64, keys: I64, least: int) -> tuple[I64, Bools]:
    """The distinct keys in buckets (rows of equal hashes) of two or more, and for each whether one of them has
    ``least`` real documents or more."""
    _, bucket, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(sizes[bucket] > 1)
    real = np.bincount(bucket[rows], keys[rows] < PLANTED, minlength=len(sizes))
    found, number = np.unique(keys[rows], return_inverse=True)
    return found, np.bincount(number, real[bucket[rows]] >= least, minlength=len(found)) > 0


def seem_repetitive(signatures: npt.NDArray[np.uint64], texts: pa.Array, shingle_words: int) -> Bools:
    """Which texts may be repetitive, from their MinHash values (a row for each text, 32 bits)."""
    # The mean of the least of n uniform numbers is 1 / (n + 1).
    distinct = 1 / np.maximum((signatures + 0.5).mean(axis=1) / 2**32, 2.0**-40) - 1
    return np.asarray(distinct < _ESTIMATE_MARGIN * MIN_DISTINCT_FRAC * n_shingles(texts, shingle_words))


def to_compare(texts: pa.Array, seem: Bools, common: I64, shingle_words: int, max_core_frac: float) -> list[str | None]:
    """For each normalised text what is compared instead: its core; "" where it is repetitive, so that it is compared
    with none; None where it is compared as it is. ``seem``: those that ``seem_repetitive``; ``common``: sorted hashes
    of common shingles."""
    found: list[str | None] = [None] * len(texts)
    if len(common):
        found = _cores(texts, common, shingle_words, max_core_frac)
    rows = [row for row, one in enumerate(found) if one is not None or seem[row]]
    some = pa.array([texts[row].as_py() if found[row] is None else found[row] for row in rows], pa.large_string())
    width = max(shingle_words, MIN_WORDS)
    distinct = np.asarray(pc.list_value_length(shingle_sets(some, width)))
    for row, repeats in zip(rows, (distinct < MIN_DISTINCT_FRAC * n_shingles(some, width)).tolist(), strict=True):
        found[row] = "" if repeats else found[row]
    return found


def n_shingles(texts: pa.Array, shingle_words: int) -> I64:
    """How many shingles each normalised text has, those that it repeats counted in; 1 where it has fewer words."""
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
    """First word and end of the core; None where the whole is compared. ``rare``: of the shingles, in their order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rare, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    within = shingle_words - 1  # so many words of boilerplate are in the shingles at either end of a run
    long = np.flatnonzero(stops - starts >= MIN_RUN_WORDS + within)
    if not len(long):
        return None
    first, last = int(starts[long[0]]), int(stops[long[-1]])
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
