"""Proposes candidate pairs from buckets: documents that agree in one band of their signatures.

Guarantees: all pairs of a bucket of at most ``bucket_documents``; of a larger one at most ``2 * bucket_neighbours``
pairs for each document, so that the number of pairs is linear in the documents. The pairs depend on the texts, not on
keys. Planted documents (keys from PLANTED on) never change the pairs of real documents.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Pairs = tuple[I64, I64]

PLANTED = 1 << 60
"""First key of planted documents."""


def pairs_in_buckets(
    hashes: I64, keys: I64, orders: I64, places: I64, *, bucket_documents: int, bucket_neighbours: int
) -> Pairs:
    """Return candidate pairs, first key < second key, possibly repeated.

    In row i document ``keys[i]`` has ``hashes[i]`` in some band; rows of equal hashes are a bucket. In a large bucket
    each document is paired with its neighbours by ``orders`` (near-duplicates are likely to have the same) and with the
    first ones by ``places`` (held-out documents first, then in the same order in all buckets).
    """
    if not len(hashes):
        return keys, keys
    rows = _not_alone(hashes)
    # Planted documents come last in a bucket and are counted separately.
    rows = rows[np.lexsort((places[rows], orders[rows], keys[rows] >= PLANTED, hashes[rows]))]
    hashes, keys, orders, places = hashes[rows], keys[rows], orders[rows], places[rows]
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)])
    sizes = np.diff(starts, append=len(hashes))
    real = np.add.reduceat((keys < PLANTED).astype(np.int64), starts) if len(starts) else sizes
    large = real > bucket_documents
    pairs = [
        _all_pairs(keys, starts[~large], real[~large]),
        _neighbours(keys, starts[large], real[large], bucket_neighbours),
        with_the_first(*_by_place(keys, places, starts[large], real[large]), bucket_neighbours),
    ]
    for bucket in np.flatnonzero((sizes > real) & (real > 0)).tolist():
        start = starts[bucket]
        middle = starts[bucket] + real[bucket]
        stop = starts[bucket] + sizes[bucket]
        reach = bucket_neighbours if large[bucket] else bucket_documents
        bucket_keys = keys[start:middle]
        bucket_orders = orders[start:middle]
        bucket_places = places[start:middle]
        partners = _partners_of_planted(bucket_keys, bucket_orders, bucket_places, orders[middle:stop], reach)
        planted = keys[middle:stop].tolist()
        pairs += [(real_keys, np.full(len(real_keys), key)) for real_keys, key in zip(partners, planted, strict=True)]
    first, second = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return np.minimum(first, second), np.maximum(first, second)


def with_the_first(keys: I64, starts: I64, sizes: I64, n: int) -> Pairs:
    """Pair each document of a group with the first ``n`` of it, which are on the left."""
    begin, place = _places_in(starts, sizes)
    left, right = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(n):
        later = place > first
        left.append(keys[begin[later] + first])
        right.append(keys[begin[later] + place[later]])
    return np.concatenate(left), np.concatenate(right)


def _not_alone(hashes: I64) -> I64:
    """Return the rows whose hash occurs twice or more; they are few, so that further work on them is cheap."""
    order = np.argsort(hashes)
    sorted_ = hashes[order]
    same = np.concatenate([[False], sorted_[1:] == sorted_[:-1], [False]])
    rows: I64 = order[same[1:] | same[:-1]]
    return rows


def _all_pairs(keys: I64, starts: I64, sizes: I64) -> Pairs:
    """Return all pairs in each bucket; buckets of the same size are handled together."""
    left, right = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for size in np.unique(sizes[sizes > 1]).tolist():
        rows, columns = np.triu_indices(size, 1)
        begins = starts[sizes == size][:, None]
        left.append(keys[begins + rows].ravel())
        right.append(keys[begins + columns].ravel())
    return np.concatenate(left), np.concatenate(right)


def _neighbours(keys: I64, starts: I64, sizes: I64, n: int) -> Pairs:
    """Pair each document with the next ``n`` of its bucket."""
    begin, place = _places_in(starts, sizes)
    remaining = np.repeat(sizes, sizes) - place
    left, right = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for step in range(1, n + 1):
        rows = (begin + place)[remaining > step]
        left.append(keys[rows])
        right.append(keys[rows + step])
    return np.concatenate(left), np.concatenate(right)


def _by_place(keys: I64, places: I64, starts: I64, sizes: I64) -> tuple[I64, I64, I64]:
    """Return the keys of buckets, sorted by place in each, and the start and size of each bucket."""
    begin, place = _places_in(starts, sizes)
    rows = begin + place
    rows = rows[np.lexsort((places[rows], begin))]
    return keys[rows], np.cumsum(sizes) - sizes, sizes


def _places_in(starts: I64, sizes: I64) -> Pairs:
    """Return for each member of each bucket the start of the bucket, and its index in it."""
    return np.repeat(starts, sizes), np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _partners_of_planted(real: I64, orders: I64, places: I64, planted_orders: I64, reach: int) -> list[I64]:
    """Return for each planted document the real documents with which a real one in its place would be paired."""
    first = real[np.argsort(places)[:reach]]
    at = np.searchsorted(orders, planted_orders).tolist()
    return [np.union1d(first, real[max(0, place - reach) : place + reach]) for place in at]
