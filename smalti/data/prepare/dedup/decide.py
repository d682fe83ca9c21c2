"""Decides which documents are kept, from the near pairs, the groups of equal words, and the order of documents.

The order is: held-out, score (highest first), id (bytes), source, text; planted documents come last. A document is kept
unless it is near to an earlier one that is kept; held-out documents are all kept. So a dropped document is near to a
kept one. Memory: about 600 bytes for each document with a partner and 300 for each near pair.
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

EXACT = "dedup/same-words"
EXACT_HELDOUT = "dedup/same-words-as-heldout"
NEAR = "dedup/near"
NEAR_HELDOUT = "dedup/near-heldout"

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
"""A dropped document; ``score`` is its similarity to ``partner`` (``source/id``), which is kept."""


@dataclass(frozen=True)
class Near:
    """Pairs of keys that are near, with their similarities; of documents with equal words only the node."""

    a: I64
    b: I64
    jaccard: Floats
    containment: Floats


def keep_greedily(n: int, lower: I64, higher: I64, always_kept: Bools) -> Bools:
    """Return which of ``n`` documents, numbered in their order, are kept. Edge i joins ``lower[i] < higher[i]``."""
    order = np.argsort(higher, kind="stable")
    # A plain loop, because each decision depends on those before it. About 10 million edges a second.
    is_kept = bytearray(np.ones(n, np.bool_).tobytes())
    fixed = always_kept.tobytes()
    for first, second in zip(lower[order].tolist(), higher[order].tolist(), strict=True):
        if is_kept[first] and not fixed[second]:
            is_kept[second] = 0
    return np.frombuffer(bytes(is_kept), np.bool_)


class Ordered:
    """The documents of near pairs and of groups with equal words, in their order."""

    def __init__(self, documents: pa.Table, equal_keys: I64, equal_nodes: I64) -> None:
        """``documents`` has the columns key, id, source, heldout, score, digest_0 and digest_1.

        Document ``equal_keys[i]`` has the words of its node ``equal_nodes[i]``; a node is listed with itself.
        """
        self._documents = documents.take(_order(documents))
        keys = np.asarray(self._documents.column("key"))
        self._heldout = np.asarray(self._documents.column("heldout"))
        self._rank_of = _Ranks(keys)
        self._keys = keys
        self._node = np.arange(len(keys))  # rank of the first document with the same words
        members = self._rank_of(equal_keys)
        groups = self._rank_of(equal_nodes)
        first = np.arange(len(keys))
        np.minimum.at(first, groups, members)
        self._node[members] = first[groups]
        self._node_keys = keys.copy()  # rank of that document -> key of its group in pairs
        self._node_keys[first[groups]] = keys[groups]

    def uncompared(self, near: Near, most: int) -> tuple[I64, I64]:
        """Return further pairs of keys (first < second) to compare.

        Of the documents near to a dropped one, each is paired with the first ``most`` that are kept.
        """
        lower, higher = self._edges(near)
        is_kept = keep_greedily(len(self._keys), lower, higher, self._heldout)
        document = np.concatenate([lower, higher])
        neighbour = np.concatenate([higher, lower])
        chosen = ~is_kept[document] & (self._keys[document] < PLANTED)
        dropped = document[chosen]
        near_dropped = neighbour[chosen]
        rows = np.lexsort((near_dropped, ~is_kept[near_dropped], dropped))  # kept documents first
        dropped = dropped[rows]
        near_dropped = near_dropped[rows]
        starts = np.flatnonzero(np.concatenate([[True], dropped[1:] != dropped[:-1]])[: len(dropped)])
        first, second = with_the_first(near_dropped, starts, np.diff(starts, append=len(dropped)), most)
        chosen = is_kept[first] & (~self._heldout[second]) & (self._keys[first] < PLANTED)
        first = first[chosen]
        second = second[chosen]
        n = len(self._keys)
        pairs = np.setdiff1d(np.minimum(first, second) * n + np.maximum(first, second), lower * n + higher)
        a = self._node_keys[pairs // n]
        b = self._node_keys[pairs % n]
        return np.minimum(a, b), np.maximum(a, b)

    def decide(self, near: Near, threshold: float) -> pa.Table:
        """Return the dropped documents as DECISION_SCHEMA, sorted by key."""
        keys = self._keys
        heldout = self._heldout
        node = self._node
        lower, higher = self._edges(near)
        is_kept = keep_greedily(len(keys), lower, higher, heldout)
        partner, score, is_jaccard = _partners(lower, higher, near, is_kept, heldout, threshold)
        is_node = node == np.arange(len(keys))
        is_dropped = ~heldout & ~(is_kept[node] & is_node)
        is_copy = is_dropped & is_kept[node]
        ranks = np.flatnonzero(is_dropped)
        to = np.where(is_copy, node, partner[node])[ranks]
        assert bool((to >= 0).all()) and bool((is_kept[to] & is_node[to]).all()), "a drop without a kept partner"
        copy = is_copy[ranks]
        to_heldout = heldout[to]
        names = _names(self._documents.take(pa.array(to)))
        rules = np.where(copy, np.where(to_heldout, EXACT_HELDOUT, EXACT), np.where(to_heldout, NEAR_HELDOUT, NEAR))
        scores = np.where(copy, 1.0, score[node][ranks])
        reasons = [
            f"same words as {name}" if same else f"{'Jaccard' if jaccard else 'containment'} {value:.3f} with {name}"
            for name, same, jaccard, value in zip(names, copy, is_jaccard[node][ranks], scores, strict=True)
        ]
        ids = self._documents.column("id").take(pa.array(ranks)).to_pylist()
        columns = [keys[ranks], ids, rules.tolist(), reasons, scores, names]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, DECISION_SCHEMA, strict=True)]
        return pa.Table.from_arrays(arrays, schema=DECISION_SCHEMA).sort_by("key")

    def _edges(self, near: Near) -> tuple[I64, I64]:
        a = self._node[self._rank_of(near.a)]
        b = self._node[self._rank_of(near.b)]
        return np.minimum(a, b), np.maximum(a, b)


class _Ranks:
    """Maps arrays of keys to ranks in the order."""

    def __init__(self, keys: I64) -> None:
        self._rank = np.argsort(keys)
        self._sorted = keys[self._rank]

    def __call__(self, keys: I64) -> I64:
        places = np.searchsorted(self._sorted, keys)
        assert bool((self._sorted[places] == keys).all()), "a pair has an unknown document"
        return self._rank[places]


def _order(documents: pa.Table) -> pa.Array:
    planted = pc.greater_equal(documents.column("key"), PLANTED)
    table = documents.append_column("planted", planted)
    table = table.append_column("trained", pc.invert(documents.column("heldout")))
    names = ("planted", "trained", "score", "id", "source", "digest_0", "digest_1", "key")
    return pc.sort_indices(table, [(name, "descending" if name == "score" else "ascending") for name in names])


def _partners(
    lower: I64, higher: I64, near: Near, is_kept: Bools, heldout: Bools, threshold: float
) -> tuple[I64, Floats, Bools]:
    """Return for each dropped document its partner, their similarity, and whether that is Jaccard; -1, 0 for others.

    The partner is a held-out document if there is one, then the most similar, then the first.
    """
    n = len(is_kept)
    partner = np.full(n, -1)
    score = np.zeros(n)
    is_jaccard = np.ones(n, np.bool_)
    chosen = is_kept[lower] & ~is_kept[higher]
    lower = lower[chosen]
    higher = higher[chosen]
    jaccard = near.jaccard[chosen]
    by_jaccard = jaccard >= threshold
    value = np.where(by_jaccard, jaccard, near.containment[chosen])
    best = np.lexsort((lower, -value, ~by_jaccard, ~heldout[lower], higher))[::-1]
    # The last assignment wins, so the best comes last.
    dropped = higher[best]
    partner[dropped] = lower[best]
    score[dropped] = value[best]
    is_jaccard[dropped] = by_jaccard[best]
    return partner, score, is_jaccard


def _names(documents: pa.Table) -> list[str]:
    pairs = zip(documents.column("source").to_pylist(), documents.column("id").to_pylist(), strict=True)
    return [f"{source}/{id_}" for source, id_ in pairs]
