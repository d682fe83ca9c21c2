"""Shingles, buckets and the keeper of a deduplication against slow, plain references."""

from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.data.prepare.dedup.buckets import PLANTED, pairs_in_buckets
from smalti.data.prepare.dedup.decide import DECISION_SCHEMA, Near, Ordered, keep_greedily
from smalti.data.prepare.dedup.shingles import shared, shingle_sets, similarities


def brute_set(text: str, width: int) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + width]) for i in range(max(1, len(words) - width + 1))} if words else set()


words = st.lists(st.sampled_from(["a", "b", "ab", "ä", "你", "x_y", "0"]), max_size=12).map(" ".join)


@given(st.lists(words, min_size=2, max_size=20), st.integers(1, 5))
@pytest.mark.proof
def test_shingles_and_what_they_share_are_those_of_python_sets(texts, width):
    sets = shingle_sets(pa.array(texts, pa.large_string()), width)
    plain = [brute_set(text, width) for text in texts]
    assert [len(one) for one in sets.to_pylist()] == [len(one) for one in plain]
    turned = sets.take(pa.array(range(len(texts) - 1, -1, -1)))
    common, one, two = shared(sets, turned)
    assert common.tolist() == [len(a & b) for a, b in zip(plain, reversed(plain), strict=True)]
    jaccard, containment = similarities(common, one, two)
    for a, b, j, c in zip(plain, reversed(plain), jaccard, containment, strict=True):
        assert j == pytest.approx(len(a & b) / max(len(a | b), 1))
        assert c == pytest.approx(len(a & b) / max(min(len(a), len(b)), 1))


def test_a_shingle_does_not_depend_on_its_place_or_the_text_before_it():
    long = " ".join(f"w{i}" for i in range(60_000))  # more than one piece
    alone, among = shingle_sets(pa.array(["same words here"]), 3), shingle_sets(pa.array([long, "same words here"]), 3)
    assert alone.to_pylist()[0] == among.to_pylist()[1]
    assert len(among.to_pylist()[0]) == 59_998
    one_word = "x" * 400_000  # no blank in more than a piece
    assert len(shingle_sets(pa.array([f"{one_word} a", f"{one_word} b"]), 1).values) == 4


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60), st.integers(2, 12))
def test_small_buckets_give_all_pairs_and_large_ones_few(rows, most):
    rows = sorted(set(rows))
    hashes, keys = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    orders = (keys * 7919) % 13
    one, two = pairs_in_buckets(hashes, keys, orders, keys, bucket_documents=most, bucket_neighbours=2)
    assert (one < two).all() if len(one) else True
    found = set(zip(one.tolist(), two.tolist(), strict=True))
    small, large = set(), 0
    for bucket in range(5):
        members = sorted(key for number, key in rows if number == bucket)
        if len(members) <= most:
            small |= set(combinations(members, 2))
        else:
            large += 4 * len(members)
            small |= {tuple(sorted((first, other))) for first in members[:2] for other in members if other != first}
    assert small <= found
    assert len(one) <= large + sum(n * (n - 1) // 2 for n in np.unique(hashes, return_counts=True)[1] if n <= most)


@pytest.mark.slow
def test_a_bucket_of_many_documents_gives_pairs_in_proportion_and_alike_ones_meet():
    n = 60_000
    keys = np.arange(n, dtype=np.int64)
    orders = keys // 2 * 2
    one, two = pairs_in_buckets(np.zeros(n, np.int64), keys, orders, -keys, bucket_documents=100, bucket_neighbours=8)
    assert len(one) < 16 * n
    assert {(0, 1), (40_000, 40_001), (7, 59_999)} <= set(zip(one.tolist(), two.tolist(), strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=40), st.lists(st.integers(0, 3), max_size=15)
)
def test_planted_documents_change_no_pair_of_real_ones(rows, planted):
    rows = sorted(set(rows))
    hashes = np.array([row[0] for row in rows], np.int64)
    keys = np.array([row[1] for row in rows], np.int64)
    options = {"bucket_documents": 5, "bucket_neighbours": 2}
    before = pairs_in_buckets(hashes, keys, keys % 5, keys % 7, **options)
    more = np.concatenate([hashes, np.array(planted, np.int64)])
    more_keys = np.concatenate([keys, PLANTED + np.arange(len(planted), dtype=np.int64)])
    one, two = pairs_in_buckets(more, more_keys, more_keys % 5, more_keys % 7, **options)
    real = two < PLANTED
    assert sorted(zip(*before, strict=True)) == sorted(zip(one[real], two[real], strict=True))
    assert not (one >= PLANTED).any()


graphs = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1]), max_size=30),
        st.integers(0, n),
    )
)


@pytest.mark.slow
@given(graphs)
@pytest.mark.proof
def test_the_keeper_is_the_plain_greedy_one(graph):
    n, edges, n_heldout = graph
    near = {frozenset(edge) for edge in edges}
    kept: list[int] = []
    for document in range(n):  # in their order, held-out ones first
        if document < n_heldout or not any(frozenset((document, other)) in near for other in kept):
            kept.append(document)
    lower, higher = (np.array([edge[i] for edge in edges], np.int64) for i in (0, 1))
    found = keep_greedily(n, lower, higher, np.arange(n) < n_heldout)
    assert np.flatnonzero(found).tolist() == kept


def documents_of(ids, heldout=(), scores=None):
    n = len(ids)
    columns = {
        "key": pa.array(range(n), pa.int64()),
        "id": pa.array(ids, pa.large_string()),
        "source": pa.array(["s"] * n, pa.large_string()),
        "heldout": pa.array([id_ in heldout for id_ in ids]),
        "score": pa.array(scores or [float("-inf")] * n, pa.float64()),
        "digest_0": pa.array([0] * n, pa.int64()),
        "digest_1": pa.array([0] * n, pa.int64()),
    }
    return pa.table(columns)


def near_of(*pairs):
    columns = [np.array(column) for column in zip(*pairs, strict=True)] if pairs else [np.empty(0, int)] * 3
    return Near(
        columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2].astype(float), columns[2].astype(float)
    )


NONE = np.empty(0, np.int64)


def test_a_chain_takes_nothing_along_that_is_not_near_to_what_stays():
    gone = Ordered(documents_of(["a", "b", "c"]), NONE, NONE).decide(near_of((0, 1, 0.8), (1, 2, 0.9)), 0.65)
    assert gone.to_pylist() == [
        {"key": 1, "id": "b", "rule": "dedup/near", "reason": "Jaccard 0.800 with s/a", "score": 0.8, "partner": "s/a"}
    ]


def test_the_better_score_stays_then_the_smaller_id():
    pairs = near_of((0, 1, 0.8), (0, 2, 0.8), (1, 2, 0.8))
    by_id = Ordered(documents_of(["c", "b", "a"]), NONE, NONE).decide(pairs, 0.65)
    assert by_id.column("key").to_pylist() == [0, 1]
    by_score = Ordered(documents_of(["c", "b", "a"], scores=[1.0, 3.0, 2.0]), NONE, NONE).decide(pairs, 0.65)
    assert by_score.column("partner").to_pylist() == ["s/b", "s/b"]


def test_held_out_documents_stay_and_take_training_ones_with_them():
    pairs = near_of((0, 1, 0.9), (1, 2, 0.7), (2, 3, 0.7))
    gone = Ordered(documents_of(["a", "b", "h", "i"], heldout=("h", "i")), NONE, NONE).decide(pairs, 0.65)
    assert gone.column("rule").to_pylist() == ["dedup/near-heldout"]  # b; a is near to b alone, which went
    assert gone.column("partner").to_pylist() == ["s/h"]
    ordered = Ordered(documents_of(["a", "h", "i"], heldout=("h", "i")), np.array([0, 1, 2]), np.array([0, 0, 0]))
    equal = ordered.decide(near_of(), 0.65)
    assert equal.to_pylist()[0]["reason"] == "same words as s/h"
    assert equal.column("key").to_pylist() == [0]


def test_copies_of_a_dropped_document_name_the_kept_one():
    # b and d have the same words; b is near to a.
    ordered = Ordered(documents_of(["a", "d", "b"]), np.array([1, 2]), np.array([1, 1]))
    gone = ordered.decide(near_of((0, 1, 0.7)), 0.65)
    assert [(row["key"], row["partner"], row["score"]) for row in gone.to_pylist()] == [
        (1, "s/a", 0.7),
        (2, "s/a", 0.7),
    ]
    assert gone.schema == DECISION_SCHEMA


def test_what_stays_beside_the_same_near_document_is_compared_with_the_first_of_them():
    # b goes for a, so c and d may be near to a too; what was planted (e) asks for nothing and is asked about.
    documents = documents_of(["a", "b", "c", "d", "e"])
    keys = pa.array([0, 1, 2, 3, PLANTED], pa.int64())
    documents = documents.set_column(0, "key", keys)
    ordered = Ordered(documents, NONE, NONE)
    near = near_of((0, 1, 0.8), (1, 2, 0.8), (1, 3, 0.8), (1, PLANTED, 0.8))
    assert [side.tolist() for side in ordered.uncompared(near, 1)] == [[0, 0, 0], [2, 3, PLANTED]]
    assert [side.tolist() for side in ordered.uncompared(near, 2)] == [[0, 0, 0, 2, 2], [2, 3, PLANTED, 3, PLANTED]]
    assert not len(ordered.uncompared(near_of((0, 1, 0.8), (2, 3, 0.8)), 8)[0])
