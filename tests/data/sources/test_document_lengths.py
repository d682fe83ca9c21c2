"""Lengths of documents: found in whole or by blocks without a bias, and what a context length makes of them."""

import numpy as np
import pytest

from smalti.data.sources.document_lengths import (
    CONTEXT_TOKENS,
    context_summary,
    find_documents,
    length_curve,
)

EOD = 7


class Memory:
    """A source in memory with the methods that these tests use."""

    dtype = np.dtype("<u2")
    eod_id: int | None = EOD
    n_documents: int | None = None

    def __init__(self, lengths: list[int], *, closed: bool = True) -> None:
        parts = [np.r_[np.full(n, 1), EOD] for n in lengths]
        self.tokens = np.concatenate(parts)[: None if closed else -1].astype(self.dtype)
        self.n_tokens, self.read_tokens = self.tokens.size, 0

    def read_rows(self, begins: np.ndarray, out: np.ndarray) -> None:
        for begin, row in zip(begins.tolist(), out, strict=True):
            assert begin >= 0
            assert begin + row.size <= self.n_tokens
            row[:] = self.tokens[begin : begin + row.size]
            self.read_tokens += row.size


def test_all_documents_of_a_small_source():
    lengths = [3, 0, 5, 1, 0]
    for closed in (True, False):
        found = find_documents(Memory(lengths, closed=closed), 1000)
        # the last document of the open one has no token at all: there is nothing of it
        assert found.lengths.tolist() == (lengths if closed else lengths[:-1])
        assert found.begins[:3].tolist() == [0, 4, 5]
        assert found.note is None
    assert find_documents(Memory([2, 4], closed=False), 1000).lengths.tolist() == [2, 4]


def test_blocks_of_a_large_source_show_long_documents_as_often_as_short_ones():
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(20_000) < 0.02, 3_000, 40).tolist()  # 60 % of all tokens lie in 2 % of the documents
    source = Memory(lengths)
    found = find_documents(source, source.n_tokens // 4)
    assert "64 evenly spaced blocks of 7,910 tokens" in found.note
    assert source.read_tokens < source.n_tokens * 0.8
    long_frac = (found.lengths == 3_000).mean()
    assert long_frac == pytest.approx(0.02, abs=0.006)
    starts = np.flatnonzero(np.r_[EOD, source.tokens[:-1]] == EOD)
    assert np.isin(found.begins, starts).all(), "each begins behind a closing token"
    assert np.unique(found.begins).size == found.begins.size, "none twice"


def test_a_document_longer_than_many_blocks_is_followed_to_its_end():
    source = Memory([20, 50_000, 100, 100])
    found = find_documents(source, 3_200)
    assert found.lengths[:2].tolist() == [20, 50_000]


def test_documents_without_closing_tokens_are_taken_by_number(monkeypatch):
    source = Memory([1])
    source.eod_id = None
    assert find_documents(source, 1000) is None
    source.n_documents = 50
    source.document_span = lambda number: (number * 10, number * 10 + number)
    assert find_documents(source, 1000).lengths.tolist() == list(range(50))
    monkeypatch.setattr("smalti.data.sources.document_lengths._MAX_NUMBERED_DOCUMENTS", 5)
    found = find_documents(source, 1000)
    assert found.lengths.tolist() == [5, 15, 25, 35, 45]
    assert found.note == "lengths are of 5 documents, evenly spaced among 50"


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [256, 512])
def test_what_a_token_sees_is_the_mean_over_all_places_of_the_cut(size):
    for n in (1, 200, 256, 257, 700, 3000):
        row = next(row for row in context_summary(np.array([n])) if row["context_tokens"] == size)
        seen = [[min(i, (i + shift) % size) for i in range(n)] for shift in range(size)]
        assert row["seen_concat_tokens"] == pytest.approx(np.mean(seen))
        assert row["seen_best_fit_tokens"] == pytest.approx(np.mean([i % size for i in range(n)]))
        # with its closing token a document has n places where a row may end inside it
        cuts = [any((i + shift) % size == 0 for i in range(1, n + 1)) for shift in range(size)]
        assert row["cut_concat_frac"] == pytest.approx(np.mean(cuts))
        assert row["cut_best_fit_frac"] == (n + 1 > size)
        assert row["in_long_documents_frac"] == (n >= size)


def test_contexts_end_where_no_document_is_that_long():
    assert [row["context_tokens"] for row in context_summary(np.array([10]))] == [256, 512, 1024, 2048]
    assert [row["context_tokens"] for row in context_summary(np.array([5000]))][-1] == 8192
    assert len(context_summary(np.array([1 << 20]))) == len(CONTEXT_TOKENS)
    assert context_summary(np.array([0, 0])) == context_summary(np.zeros(0, dtype=np.int64)) == []


def test_curve_of_tokens_in_long_documents():
    curve = length_curve(np.array([1, 3, 3, 0, 13]))
    points = dict(zip(curve["tokens_in_document"], curve["in_longer_frac"], strict=True))
    assert points[1] == 1
    assert points[2] == points[2.83] == 19 / 20
    assert points[4] == points[8] == points[13] == 13 / 20
    assert list(points)[-1] == 13
    assert length_curve(np.array([0])) == {"tokens_in_document": [], "in_longer_frac": []}
    assert length_curve(np.array([1]))["in_longer_frac"] == [1.0]
