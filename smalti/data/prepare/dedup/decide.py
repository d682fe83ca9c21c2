"""Which documents stay: a pure function of the verified pairs, the groups of equal words, and the order of documents.

The order is total: held-out documents, then higher scores, then smaller ids (as bytes), then sources, then texts. In
this order each document stays unless it is near to one that stays already. So what goes is near to something that
stays, no chain of likenesses takes a document along, and held-out documents all stay. Planted documents come last, so
they change nothing for the others.

In memory are the documents that have a partner (about 600 bytes each) and the near pairs (about 300 bytes each), no
texts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.prepare.dedup.buckets import PLANTED, with_the_first

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

EXACT, EXACT_HELDOUT = "dedup/same-words", "dedup/same-words-as-heldout"
NEAR, NEAR_HELDOUT = "dedup/near", "dedup/near-heldout"

DECISION_SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("id", pa.string()),
        ("rule", pa.string()),
        ("reason", pa.string()),
        ("score", pa.float64()),
        ("partner", pa.string()),
    ]
)
"""A document that goes; ``score`` is the measured similarity to ``partner`` (``source/id``), which stays."""


@dataclass(frozen=True)
class Near:
    """Verified pairs of keys that are near, with their similarities. Neither key is a copy of words: nodes only."""

    a: I64
    b: I64
    jaccard: Floats
    containment: Floats


def keep_greedily(n: int, lower: I64, higher: I64, stays_anyway: Bools) -> Bools:
    """Which of ``n`` documents, numbered in their order, stay. Edge i joins ``lower[i] < higher[i]``."""
    kept = np.ones(n, np.bool_)
    order = np.argsort(higher, kind="stable")
    # A plain loop: each document's fate hangs on those before it. About 10 million edges a second.
    alive = bytearray(kept.tobytes())
    fixed = stays_anyway.tobytes()
    for one, two in zip(lower[order].tolist(), higher[order].tolist(), strict=True):
        if alive[one] and not fixed[two]:
            alive[two] = 0
    return np.frombuffer(bytes(alive), np.bool_)


class Ordered:
    """The documents that a near pair or a group of equal words names, in their order."""

    def __init__(self, documents: pa.Table, equal_keys: I64, equal_nodes: I64) -> None:
        """``documents``: key, id, source, heldout, score, digest_0, digest_1.

        Row i of ``equal_*`` says that a document has the words of its node (a node of itself too).
        """
        self._documents = documents.take(_order(documents))
        keys = np.asarray(self._documents.column("key"))
        self._heldout = np.asarray(self._documents.column("heldout"))
        self._rank_of = _Ranks(keys)
        self._keys = keys
        self._node = np.arange(len(keys))  # rank of the first, in the order, of the documents with the same words
        members, groups = self._rank_of(equal_keys), self._rank_of(equal_nodes)
        first = np.arange(len(keys))
        np.minimum.at(first, groups, members)
        self._node[members] = first[groups]
        self._node_keys = keys.copy()  # rank of such a first one -> the key that stands for its group in pairs
        self._node_keys[first[groups]] = keys[groups]

    def unmet(self, near: Near, most: int) -> tuple[I64, I64]:
        """Pairs of keys (first < second) that should be compared too: what is near to a document that goes with the
        first ``most`` of what stays beside it."""
        lower, higher = self._edges(near)
        kept = keep_greedily(len(self._keys), lower, higher, self._heldout)
        one, two = np.concatenate([lower, higher]), np.concatenate([higher, lower])
        counts = ~kept[one] & (self._keys[one] < PLANTED)
        gone, beside = one[counts], two[counts]
        rows = np.lexsort((beside, ~kept[beside], gone))  # what stays comes first
        gone, beside = gone[rows], beside[rows]
        starts = np.flatnonzero(np.concatenate([[True], gone[1:] != gone[:-1]])[: len(gone)])
        first, second = with_the_first(beside, starts, np.diff(starts, append=len(gone)), most)
        counts = kept[first] & (~self._heldout[second]) & (self._keys[first] < PLANTED)
        first, second = first[counts], second[counts]
        n = len(self._keys)
        pairs = np.setdiff1d(np.minimum(first, second) * n + np.maximum(first, second), lower * n + higher)
        a, b = self._node_keys[pairs // n], self._node_keys[pairs % n]
        return np.minimum(a, b), np.maximum(a, b)

    def decide(self, near: Near, threshold: float) -> pa.Table:
        """The documents that go, as DECISION_SCHEMA, sorted by key."""
        keys, heldout, node = self._keys, self._heldout, self._node
        lower, higher = self._edges(near)
        kept = keep_greedily(len(keys), lower, higher, heldout)
        partner, score, is_jaccard = _partners(lower, higher, near, kept, heldout, threshold)
        own = node == np.arange(len(keys))
        goes = ~heldout & ~(kept[node] & own)
        copy = goes & kept[node]
        ranks = np.flatnonzero(goes)
        to = np.where(copy, node, partner[node])[ranks]
        assert bool((to >= 0).all()) and bool((kept[to] & own[to]).all()), "a document goes without one that stays"
        near_score, near_jaccard = score[node][ranks], is_jaccard[node][ranks]
        copy, at_heldout = copy[ranks], heldout[to]
        names = _names(self._documents.take(pa.array(to)))
        rules = np.where(copy, np.where(at_heldout, EXACT_HELDOUT, EXACT), np.where(at_heldout, NEAR_HELDOUT, NEAR))
        scores = np.where(copy, 1.0, near_score)
        reasons = [
            f"same words as {name}" if same else f"{'Jaccard' if jaccard else 'containment'} {value:.3f} with {name}"
            for name, same, jaccard, value in zip(names, copy, near_jaccard, scores, strict=True)
        ]
        ids = self._documents.column("id").take(pa.array(ranks)).to_pylist()
        columns = [keys[ranks], ids, rules.tolist(), reasons, scores, names]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, DECISION_SCHEMA, strict=True)]
        return pa.Table.from_arrays(arrays, schema=DECISION_SCHEMA).sort_by("key")

    def _edges(self, near: Near) -> tuple[I64, I64]:
        a, b = self._node[self._rank_of(near.a)], self._node[self._rank_of(near.b)]
        return np.minimum(a, b), np.maximum(a, b)


class _Ranks:
    """Key -> place in the order, for arrays of keys."""

    def __init__(self, keys: I64) -> None:
        self._rank = np.argsort(keys)
        self._sorted = keys[self._rank]

    def __call__(self, keys: I64) -> I64:
        places = np.searchsorted(self._sorted, keys)
        assert bool((self._sorted[places] == keys).all()), "a pair names a document that is not there"
        return self._rank[places]


def _order(documents: pa.Table) -> pa.Array:
    planted = pc.greater_equal(documents.column("key"), PLANTED)
    table = documents.append_column("planted", planted)
    table = table.append_column("trained", pc.invert(documents.column("heldout")))
    names = ("planted", "trained", "score", "id", "source", "digest_0", "digest_1", "key")
    return pc.sort_indices(table, [(name, "descending" if name == "score" else "ascending") for name in names])


def _partners(
    lower: I64, higher: I64, near: Near, kept: Bools, heldout: Bools, threshold: float
) -> tuple[I64, Floats, Bools]:
    """For each document that goes: the one it is recorded with (held-out first, then the most similar, then the first),
    their similarity, and whether that is Jaccard; -1 and 0 for the others."""
    n = len(kept)
    partner, score, is_jaccard = np.full(n, -1), np.zeros(n), np.ones(n, np.bool_)
    counts = kept[lower] & ~kept[higher]
    lower, higher = lower[counts], higher[counts]
    jaccard, containment = near.jaccard[counts], near.containment[counts]
    by_jaccard = jaccard >= threshold
    value = np.where(by_jaccard, jaccard, containment)
    best = np.lexsort((lower, -value, ~by_jaccard, ~heldout[lower], higher))[::-1]
    # The last assignment wins, so the best comes last.
    partner[higher[best]], score[higher[best]], is_jaccard[higher[best]] = lower[best], value[best], by_jaccard[best]
    return partner, score, is_jaccard


def _names(documents: pa.Table) -> list[str]:
    pairs = zip(documents.column("source").to_pylist(), documents.column("id").to_pylist(), strict=True)
    return [f"{source}/{id_}" for source, id_ in pairs]
