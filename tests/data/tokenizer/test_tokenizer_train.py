"""Training: every byte has an id, ids count up with merges, and the same text gives the same tokenizer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.patterns import EOD, PATTERNS, byte_symbols
from smalti.data.tokenizer.train import train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 5, "The quick brown fox jumps over the lazy dog. " * 5, "äöü 漢字 🙂 12345"]


def test_sizes_and_ids():
    inner = train_bpe(TEXTS, 300)
    tokenizer = Tokenizer(inner, EOD)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod_id == 299
    model = json.loads(inner.to_str())["model"]
    assert sorted(model["vocab"][symbol] for symbol in byte_symbols()) == list(range(256))
    merged = [model["vocab"][left + right] for left, right in model["merges"]]
    assert merged == list(range(256, 299))


def test_byte_symbols_are_those_of_the_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_symbols()) == sorted(ByteLevel.alphabet())
    assert ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("ä\n ")[0][0] == "".join(
        byte_symbols()[byte] for byte in "ä\n ".encode()
    )


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_the_same_text_gives_the_same_tokenizer(pattern):
    first, second = (Tokenizer(train_bpe(iter(TEXTS), 320, pattern=pattern), EOD) for _ in range(2))
    assert first.digest == second.digest


def test_patterns_make_different_tokenizers():
    assert len({Tokenizer(train_bpe(TEXTS, 300, pattern=pattern), EOD).digest for pattern in PATTERNS}) == len(PATTERNS)


def test_a_small_corpus_gives_a_smaller_vocabulary():
    tokenizer = Tokenizer(train_bpe(["ab ab ab"], 1000), EOD)
    assert 257 < tokenizer.vocab_size < 270
    assert tokenizer.decode(tokenizer.encode("漢字")) == "漢字"


def test_bad_requests():
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(TEXTS, 256)
    for empty in ([], ["", ""]):
        with pytest.raises(DataError, match="no text"):
            train_bpe(empty, 300)


SMALL = Tokenizer(train_bpe(TEXTS, 300), EOD)


@pytest.mark.proof
@given(st.text())
def test_every_text_comes_back(text):
    assert SMALL.decode(SMALL.encode(text)) == text
    assert SMALL.encode_batch([text]) == [SMALL.encode(text)]
    assert SMALL.eod_id not in SMALL.encode(text)


@pytest.mark.proof
@given(st.text(alphabet="aä漢🙂 \n"), st.data())
def test_streamed_text_joins_to_the_whole(text, data):
    ids = SMALL.encode(text)
    stop = data.draw(st.integers(0, len(ids)))
    ids = ids[:stop] + ([SMALL.eod_id] if data.draw(st.booleans()) else [])
    stream = SMALL.decode_stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == SMALL.decode(ids)
    assert "�" not in "".join(pieces)


def test_of_a_very_long_run_the_beginning_trains():
    """A word of a megabyte takes the trainer hours and gigabytes."""
    runs = ("ab" * 500, " " * 1000, "-" * 1000)
    plain = train_bpe([f"some words {run} and more" for run in runs], 300)
    long = train_bpe([f"some words {run[:2] * 500_000} and more" for run in runs], 300)
    assert long.to_str() == plain.to_str()
