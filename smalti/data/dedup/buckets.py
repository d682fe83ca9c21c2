"""From buckets (documents that agree in one band of their signatures) to candidate pairs, in numpy.

Promises: every pair of a bucket of at most ``bucket_documents``; of a larger one at most ``bucket_neighbours`` pairs a
document, so that the pairs grow with the documents and never with their square. Planted documents (keys from PLANTED
on) never change which pairs of real documents are proposed.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

PLANTED = 1 << 60
"""Keys of planted documents begin here."""


def pairs_in_buckets(
    hashes: I64, keys: I64, orders: I64, *, bucket_documents: int, bucket_neighbours: int
) -> tuple[I64, I64]:
    """Candidate pairs: first key < second key, maybe repeated.

    Row i says that document ``keys[i]`` has ``hashes[i]`` in some band; rows of equal hashes are a bucket. In a large
    bucket the documents are sorted by ``orders`` (which near-duplicates are likely to share) and meet their neighbours.
    """
    if not len(hashes):
        return keys, keys
    hashes, keys, orders = _not_alone(hashes, keys, orders)
    # A bucket holds real documents first: what is planted comes behind and is counted apart.
    planted = keys >= PLANTED
    order = np.lexsort((keys, orders, planted, hashes))
    hashes, keys, orders, planted = hashes[order], keys[order], orders[order], planted[order]
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)])
    sizes = np.diff(starts, append=len(hashes))
    real_sizes = np.add.reduceat((~planted).astype(np.int64), starts) if len(starts) else sizes
    large = real_sizes > bucket_documents
    found = [
        _all_pairs(keys, starts[~large], real_sizes[~large]),
        _neighbours(keys, starts[large], real_sizes[large], bucket_neighbours),
        _planted_pairs(keys, orders, starts, sizes, real_sizes, bucket_documents, bucket_neighbours),
    ]
    one = np.concatenate([pair[0] for pair in found])
    two = np.concatenate([pair[1] for pair in found])
    return np.minimum(one, two), np.maximum(one, two)


def _not_alone(hashes: I64, keys: I64, orders: I64) -> tuple[I64, I64, I64]:
    """The rows whose hash occurs twice or more: few, so that what follows costs little."""
    order = np.argsort(hashes)
    sorted_ = hashes[order]
    same = np.concatenate([[False], sorted_[1:] == sorted_[:-1], [False]])
    rows = order[same[1:] | same[:-1]]
    return hashes[rows], keys[rows], orders[rows]


def _all_pairs(keys: I64, starts: I64, sizes: I64) -> tuple[I64, I64]:
    """All pairs inside each bucket: the buckets of one size together."""
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for size in np.unique(sizes[sizes > 1]).tolist():
        rows, columns = np.triu_indices(size, 1)
        begins = starts[sizes == size][:, None]
        one.append(keys[begins + rows].ravel())
        two.append(keys[begins + columns].ravel())
    return np.concatenate(one), np.concatenate(two)


def _neighbours(keys: I64, starts: I64, sizes: I64, n_neighbours: int) -> tuple[I64, I64]:
    """Each document with the next ``n_neighbours`` of its bucket."""
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        bucket = keys[start : start + size]
        for step in range(1, min(n_neighbours, size - 1) + 1):
            one.append(bucket[:-step])
            two.append(bucket[step:])
    return np.concatenate(one), np.concatenate(two)


def _planted_pairs(
    keys: I64, orders: I64, starts: I64, sizes: I64, real_sizes: I64, bucket_documents: int, n_neighbours: int
) -> tuple[I64, I64]:
    """Each planted document with the real ones that a real one in its place would have met."""
    one, two = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for bucket in np.flatnonzero((sizes > real_sizes) & (real_sizes > 0)).tolist():
        middle = starts[bucket] + real_sizes[bucket]
        real, planted = keys[starts[bucket] : middle], keys[middle : starts[bucket] + sizes[bucket]]
        if real_sizes[bucket] > bucket_documents:
            places = np.searchsorted(orders[starts[bucket] : middle], orders[middle : starts[bucket] + sizes[bucket]])
            reach = n_neighbours
        else:
            places, reach = np.zeros(len(planted), np.int64), bucket_documents
        for key, place in zip(planted.tolist(), places.tolist(), strict=True):
            near = real[max(0, place - reach) : place + reach]
            one.append(near)
            two.append(np.full(len(near), key, np.int64))
    return np.concatenate(one), np.concatenate(two)
