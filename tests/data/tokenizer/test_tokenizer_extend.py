"""An extended BPE: old ids stay, old text is encoded alike, entries are those of a plain recount at every step."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.extend import extend_bpe, learn, pieces_of
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.tiktoken_encoding import structure_of
from smalti.data.tokenizer.train import train_bpe

OLD = ["def f(x):\n    return x + 1\n" * 5, "The quick brown fox jumps over the lazy dog. " * 5]
NEW = ["Der schnelle braune Fuchs springt über den faulen Hund. " * 4, "aaaa aaaaa 漢字 漢字"]


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    inner = train_bpe(OLD, 300)
    return Tokenizer(inner, EOD), Tokenizer(extend_bpe(inner, NEW, 40), EOD)


tokenizers_of_all = tokenizers()


def plainly(words: list[tuple[list[int], int]], ids: dict[str, int], n_new: int) -> list[str]:
    """The same by counting all pairs again for each entry."""
    text_of = {number: token for token, number in ids.items()}
    learned: list[str] = []
    while len(learned) < n_new:
        counts: Counter[tuple[int, int]] = Counter()
        for word, weight in words:
            for pair in pairwise(word):
                counts[pair] += weight
        pairs = [pair for pair, count in counts.items() if count > 1 and text_of[pair[0]] + text_of[pair[1]] not in
                 text_of.values()]  # fmt: skip
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-counts[pair], pair))
        new = max(text_of) + 1
        text_of[new] = text_of[best[0]] + text_of[best[1]]
        learned.append(text_of[new])
        for word, _ in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = [new]
                place += 1
    return learned


@settings(max_examples=25)
@given(
    rows=st.dictionaries(
        st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple), st.integers(1, 4), min_size=1, max_size=12
    ),
    n_new=st.integers(1, 12),
)
def test_entries_are_those_of_a_recount_at_every_step(rows, n_new):
    ids = {letter: number for number, letter in enumerate("abcd")}
    learned = learn(rows, ids, n_new)
    assert [token for _, token, _ in learned] == plainly([(list(row), n) for row, n in rows.items()], ids, n_new)
    assert [new_id for new_id, _, _ in learned] == list(range(4, 4 + len(learned)))
    assert all(token == left + right for _, token, (left, right) in learned)


def test_old_ids_stay_and_new_text_is_shorter():
    old, new = tokenizers()
    assert new.eod_id == old.eod_id == 299
    assert new.vocab_size > old.vocab_size == 300
    before, after = (structure_of(each._special)["model"] for each in (old, new))
    assert before["vocab"].items() <= after["vocab"].items()
    assert after["merges"][: len(before["merges"])] == before["merges"]
    for text in NEW:
        assert len(new.encode(text)) < 0.7 * len(old.encode(text))
        assert new.decode(new.encode(text)) == text
        assert new.encode_batch([text]) == [new.encode(text)]
    assert new.slow_because == ""


@settings(max_examples=25)
@given(st.text(st.sampled_from("Der schnelFuchaä 漢def(x)"), max_size=30))
def test_ids_are_the_old_ones_with_runs_replaced(text):
    old, new = tokenizers_of_all
    pieces = pieces_of(structure_of(new._special), 300)
    assert [piece for token in new.encode(text) for piece in pieces.get(token, [token])] == old.encode(text)


def test_pieces_are_old_ids_and_join_to_the_entry():
    old, new = tokenizers_of_all
    pieces = pieces_of(json.loads(new._special.to_str()), old.vocab_size)
    assert sorted(pieces) == list(range(300, new.vocab_size))
    for token, parts in pieces.items():
        assert max(parts) < 300
        assert b"".join(map(old.token_bytes, parts)) == new.token_bytes(token)


def test_bad_requests():
    old, _ = tokenizers_of_all
    with pytest.raises(DataError, match="no text"):
        extend_bpe(old._special, [], 10)
    with pytest.raises(UserError, match="byte-level BPE only"):
        extend_bpe(Inner(models.BPE()), NEW, 10)
