"""tiktoken rank files: the same ids as tiktoken gives, and files that are none are named by line."""

import base64

import pytest
import tiktoken

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.data.tokenizer.patterns import EOD, KNOWN_RANKS, PATTERNS
from smalti.data.tokenizer.tiktoken_encoding import structure_of, token_bytes_of
from smalti.data.tokenizer.tiktoken_ranks import known_or_given, merges_of, read_ranks
from smalti.data.tokenizer.train import train_bpe

TEXTS = [
    "def f(x):\n    return x + 1\n" * 5,
    "The quick brown fox jumps over the lazy dog. " * 5,
    "äöü 漢字 🙂 12345 aaaa aaa",
]


def rank_lines(n: int = 320) -> tuple[bytes, dict[bytes, int]]:
    inner = train_bpe(TEXTS, n + 1, pattern="cl100k")
    ranks = {token: rank for rank, token in token_bytes_of(structure_of(inner)).items()}
    ordered = sorted(ranks.items(), key=lambda entry: entry[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered), ranks


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "own.tiktoken"
    path.write_bytes(rank_lines()[0])
    return path


def test_ids_are_those_of_tiktoken(path):
    tokenizer = load_tokenizer(path, pattern="cl100k")
    ranks = rank_lines()[1]
    theirs = tiktoken.Encoding(
        "own", pat_str=PATTERNS["cl100k"], mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    for text in [*TEXTS, "wholly other text: naïve façade\n\n\t- 99.5 %"]:
        assert tokenizer.encode(text) == theirs.encode_ordinary(text)
    assert tokenizer.encode_batch(TEXTS) == theirs.encode_ordinary_batch(TEXTS)
    assert tokenizer.eod_id == theirs.encode(EOD, allowed_special="all")[0] == len(ranks)
    assert tokenizer.slow_because == ""


def test_it_becomes_a_tokenizer_json_with_the_same_ids(path, tmp_path):
    tokenizer = load_tokenizer(path, pattern="cl100k")
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.digest == tokenizer.digest
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_merges_come_back(path):
    inner = train_bpe(TEXTS, 321, pattern="cl100k")
    parts = structure_of(inner)
    to_bytes = token_bytes_of(parts)
    vocab = parts["model"]["vocab"]
    expected = [(to_bytes[vocab[left]], to_bytes[vocab[right]]) for left, right in parts["model"]["merges"]]
    assert merges_of(read_ranks(path)) == expected


def test_published_files_are_known_by_size_and_keep_their_ids():
    dbrx = known_or_given("x", 100_256, None)
    assert (dbrx.pattern, dbrx.special_tokens[dbrx.eod_token]) == ("cl100k", 100_257)
    for known in KNOWN_RANKS.values():
        assert known.pattern in PATTERNS
        assert known.eod_token in known.special_tokens
    with pytest.raises(UserError, match="does not fit"):
        known_or_given("x", 100_256, "gpt2")


def test_a_gap_before_the_end_of_document_is_filled(path, monkeypatch):
    from smalti.data.tokenizer import tiktoken_ranks as module
    from smalti.data.tokenizer.patterns import KnownRanks

    monkeypatch.setitem(module.KNOWN_RANKS, 320, KnownRanks("cl100k", EOD, {EOD: 323}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eod_id == 323
    assert tokenizer.vocab_size == 324
    assert tokenizer.slow_because == ""


def test_unknown_size_asks_for_the_pattern(path):
    with pytest.raises(UserError, match=r"320 ranks[\s\S]*pattern=cl100k"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:5], b"!!! 5", *lines[6:]], r":6: b'!!! 5' is not line 5"),
        (lambda lines: [*lines[:5], b"aGk=", *lines[6:]], ":6: "),
        (lambda lines: [*lines[:5], lines[5] + b" 9", *lines[6:]], ":6: "),
        (lambda lines: [*lines[:5], *lines[6:]], ":6: "),
        (lambda lines: [*lines, lines[0].split()[0] + b" 320"], ":321: "),
        (lambda lines: lines[:100], "no token for the byte 0x"),
        (lambda lines: [b"hello world, this is prose"], ":1: "),
        (lambda lines: [], "no token for the byte 0x00"),
    ],
)
def test_a_file_that_is_none(tmp_path, change, message):
    lines = rank_lines()[0].splitlines()
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join(change(lines)))
    with pytest.raises(DataError, match=message):
        load_tokenizer(path, pattern="cl100k")


def test_ranks_that_are_not_of_a_bpe(tmp_path):
    lines = rank_lines()[0].splitlines()
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join([*lines, base64.b64encode(b"\x01\x02\x03") + b" 320"]))
    with pytest.raises(DataError, match="not the merge of two earlier tokens"):
        load_tokenizer(path, pattern="cl100k")
