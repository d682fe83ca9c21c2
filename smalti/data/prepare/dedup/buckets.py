"""From buckets (documents that agree in one band of their signatures) to candidate pairs, in numpy.

Promises: every pair of a bucket of at most ``bucket_documents``; of a larger one at most ``2 * bucket_neighbours``
pairs a document, so that the pairs grow with the documents and never with their square. Which documents meet depends on
what they are and not on their keys. Planted documents (keys from PLANTED on) never change which real documents meet.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Pairs = tuple[I64, I64]

PLANTED = 1 << 60
"""Keys of planted documents begin here."""


def pairs_in_buckets(
    hashes: I64, keys: I64, orders: I64, places: I64, *, bucket_documents: int, bucket_neighbours: int
) -> Pairs:
    """Candidate pairs: first key < second key, maybe repeated.

    Row i says that document ``keys[i]`` has ``hashes[i]`` in some band; rows of equal hashes are a bucket. In a large
    bucket each document meets its neighbours by ``orders`` (which near-duplicates are likely to share) and the first by
    ``places`` (held-out ones first, then the same in all buckets).
    """
    if not len(hashes):
        return keys, keys
    rows = _not_alone(hashes)
    # A bucket holds real documents first: what is planted comes behind and is counted apart.
    rows = rows[np.lexsort((places[rows], orders[rows], keys[rows] >= PLANTED, hashes[rows]))]
    hashes, keys, orders, places = hashes[rows], keys[rows], orders[rows], places[rows]
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)])
    sizes = np.diff(starts, append=len(hashes))
    real = np.add.reduceat((keys < PLANTED).astype(np.int64), starts) if len(starts) else sizes
    large = real > bucket_documents
    found = [
        _all_pairs(keys, starts[~large], real[~large]),
        _neighbours(keys, starts[large], real[large], bucket_neighbours),
        with_the_first(*_by_place(keys, places, starts[large], real[large]), bucket_neighbours),
    ]
    for bucket in np.flatnonzero((sizes > real) & (real > 0)).tolist():
        start, middle, stop = starts[bucket], starts[bucket] + real[bucket], starts[bucket] + sizes[bucket]
        met = _met(keys[start:middle], orders[start:middle], places[start:middle], orders[middle:stop],
                   bucket_neighbours if large[bucket] else bucket_documents)  # fmt: skip
        found += [(one, np.full(len(one), key)) for one, key in zip(met, keys[middle:stop].tolist(), strict=True)]
    one, two = (np.concatenate([pair[side] for pair in found]) for side in (0, 1))
    return np.minimum(one, two), np.maximum(one, two)


def with_the_first(keys: I64, starts: I64, sizes: I64, n: int) -> Pairs:
    """Each document of a group with the first ``n`` of it; the first ones stand on the left."""
    begin, place = _places_in(starts, sizes)
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(n):
        later = place > first
        one.append(keys[begin[later] + first])
        two.append(keys[begin[later] + place[later]])
    return np.concatenate(one), np.concatenate(two)


def _not_alone(hashes: I64) -> I64:
    """The rows whose hash occurs twice or more: few, so that what follows costs little."""
    order = np.argsort(hashes)
    sorted_ = hashes[order]
    same = np.concatenate([[False], sorted_[1:] == sorted_[:-1], [False]])
    rows: I64 = order[same[1:] | same[:-1]]
    return rows


def _all_pairs(keys: I64, starts: I64, sizes: I64) -> Pairs:
    """All pairs inside each bucket: the buckets of one size together."""
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for size in np.unique(sizes[sizes > 1]).tolist():
        rows, columns = np.triu_indices(size, 1)
        begins = starts[sizes == size][:, None]
        one.append(keys[begins + rows].ravel())
        two.append(keys[begins + columns].ravel())
    return np.concatenate(one), np.concatenate(two)


def _neighbours(keys: I64, starts: I64, sizes: I64, n: int) -> Pairs:
    """Each document with the next ``n`` of its bucket."""
    begin, place = _places_in(starts, sizes)
    left = np.repeat(sizes, sizes) - place
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for step in range(1, n + 1):
        rows = (begin + place)[left > step]
        one.append(keys[rows])
        two.append(keys[rows + step])
    return np.concatenate(one), np.concatenate(two)


def _by_place(keys: I64, places: I64, starts: I64, sizes: I64) -> tuple[I64, I64, I64]:
    """The keys of these buckets, in each by place, one bucket after another; where each starts, and its size."""
    begin, place = _places_in(starts, sizes)
    rows = begin + place
    rows = rows[np.lexsort((places[rows], begin))]
    return keys[rows], np.cumsum(sizes) - sizes, sizes


def _places_in(starts: I64, sizes: I64) -> Pairs:
    """For each member of each bucket: where its bucket starts, and its place in it."""
    return np.repeat(starts, sizes), np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _met(real: I64, orders: I64, places: I64, planted_orders: I64, reach: int) -> list[I64]:
    """For each planted document the real ones of its bucket that a real one in its place would have met."""
    first = real[np.argsort(places)[:reach]]
    at = np.searchsorted(orders, planted_orders).tolist()
    return [np.union1d(first, real[max(0, place - reach) : place + reach]) for place in at]
