"""Both encoders give the same ids on real text; files load and save without a change; special tokens stay text."""

import json
import sysconfig
import warnings
from pathlib import Path

import pytest
from tiny_runs import tokenizer_with_unused_ids
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokenizer.patterns import EOD, PATTERNS
from smalti.data.tokenizer.train import train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 5, "The quick brown fox jumps over the lazy dog. " * 5, "äöü 漢字 🙂 12345"]
AWKWARD = [
    "", " ", "\n\n\n", " " * 3000 + "x", "\t \t\r\n \r", "don'T I'LL we've", "a\u00a0b\u3000c\u2028d", "e\u0301\u0308",
    "1234567890 ١٢٣ Ⅷ ½", "👩‍👩‍👧‍👦🏳️‍🌈", f"{EOD} <|endoftext|>",
    "\x00\x01\x7f", "ﬁ ǅ İ ß", "x" * 5000, "=" * 3000, "\ud7ff\ufffd",
]  # fmt: skip


@pytest.fixture(scope="module")
def library() -> list[str]:
    """Real files: sources of the standard library, also such in other scripts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))[::12] + sorted((root / "encodings").glob("cp12*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def test_half_a_surrogate_pair_is_refused():
    tokenizer = Tokenizer(train_bpe(TEXTS, 300), EOD)
    with pytest.raises(UserError, match=r"the text holds '\\ud800', half of a surrogate pair"):
        tokenizer.encode("a \ud800 b", special=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_bulk_ids_are_identical_on_real_text(library, pattern):
    tokenizer = Tokenizer(train_bpe(library, 2048, pattern=pattern), EOD)
    assert tokenizer.slow_because == ""
    texts = [*library, *AWKWARD]
    assert tokenizer.encode_batch(texts, threads=2) == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer(train_bpe(TEXTS, 300), EOD)


def test_special_tokens_in_a_document_are_text(small):
    plain = small.encode(f"a{EOD}b")
    assert small.eod_id not in plain
    assert small.encode_batch([f"a{EOD}b"]) == [plain]
    assert small.decode(plain) == f"a{EOD}b"
    asked = small.encode(f"a{EOD}b", special=True)
    assert asked == [*small.encode("a"), small.eod_id, *small.encode("b")]
    assert small.decode(asked) == "ab"
    assert small.decode(asked, skip_special=False) == f"a{EOD}b"
    assert small.encode(f"a{EOD}b") == plain


def test_the_bytes_of_ids_join_to_the_text(small):
    table = small.bytes_of_ids()
    assert len(table) == small.vocab_size
    assert table[small.eod_id] == b""
    text = "Grüße 😀 <|endoftext|> x"
    assert b"".join(table[i] for i in [*small.encode(text), small.eod_id]).decode() == text


def test_saved_and_loaded_it_is_the_same(small, tmp_path):
    small.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert (again.digest, again.eod_id, again.vocab_size) == (small.digest, small.eod_id, small.vocab_size)
        assert again.encode_batch(TEXTS) == small.encode_batch(TEXTS)
    again.save(tmp_path / "twice")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_transformers_loads_it_with_the_same_ids(small, tmp_path):
    transformers = pytest.importorskip("transformers")
    small.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
            theirs = kind.from_pretrained(str(tmp_path))
            for text in [*TEXTS, "  two  blanks , before . marks"]:
                assert theirs(text)["input_ids"] == small.encode(text)
                assert theirs.decode(small.encode(text)) == text
            assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == small.eod_id
            assert len(theirs) == small.vocab_size


def test_the_digest_names_what_decides_ids(small, tmp_path):
    small.save(tmp_path)
    value = json.loads((tmp_path / "tokenizer.json").read_text())
    other = tmp_path / "other.json"

    def digest() -> str:
        other.write_text(json.dumps(value))
        return load_tokenizer(other, eod_token=EOD).digest

    assert digest() == small.digest
    value["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    assert digest() == small.digest
    last = value["model"]["merges"].pop()
    value["model"]["vocab"].pop("".join(last))
    assert digest() != small.digest


def test_config_beside_is_kept_and_names_the_end_of_a_document(small, tmp_path):
    small.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": {"content": EOD}, "chat_template": "{{ messages }}"}))
    load_tokenizer(tmp_path).save(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert saved["chat_template"] == "{{ messages }}"


def test_token_bytes(small):
    assert b"".join(small.token_bytes(i) for i in small.encode("ä🙂")) == "ä🙂".encode()
    assert small.token_bytes(small.eod_id) == EOD.encode()
    with pytest.raises(UserError, match="not in the vocabulary"):
        small.token_bytes(300)
    assert small.most_token_bytes == max(len(small.token_bytes(i)) for i in range(small.vocab_size))


def test_holes_of_a_vocabulary_are_known(small, tmp_path):
    assert small.unused_ids == frozenset()
    vocab = {"<unk>": 0, "one": 1, "two": 7, "</s>": 3}
    Inner(models.WordLevel(vocab, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).unused_ids == {2, 4, 5, 6}
    assert tokenizer_with_unused_ids().unused_ids == {298, 300, 301, 302}


def word_level() -> Inner:
    inner = Inner(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "</s>": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["</s>"])
    return inner


def test_other_kinds_of_tokenizers_work_and_say_why_they_are_slow(tmp_path):
    word_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod_token == "</s>"
    assert tokenizer.encode_batch(["one two", "two"]) == [[1, 2], [2]]
    assert tokenizer.slow_because == "its split into words is not one that tiktoken knows"
    stream = tokenizer.decode_stream()
    assert "".join(stream.push(i) for i in (1, 2, 3, 1)) + stream.finish() == tokenizer.decode([1, 2, 3, 1])


def test_a_unigram_model_has_no_bytes_of_its_own():
    tokenizer = Tokenizer(Inner(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], 0)), "</s>")
    assert tokenizer.unused_ids == frozenset()
    with pytest.raises(UserError, match="the id 1 "):
        tokenizer.token_bytes(1)


def changed(how) -> Tokenizer:
    inner = train_bpe(TEXTS, 300)
    how(inner)
    return Tokenizer(inner, EOD)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda inner: setattr(inner, "normalizer", normalizers.NFC()), "normalises"),
        (lambda inner: inner.add_tokens([AddedToken("    ", special=False)]), "added tokens"),
        (lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "split"),
    ],
)
def test_tiktoken_is_left_alone_where_ids_would_differ(how, why):
    tokenizer = changed(how)
    assert why in tokenizer.slow_because
    texts = ["e\u0301    x", "plain"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_merges_out_of_order_are_noticed():
    value = json.loads(train_bpe(TEXTS, 300).to_str())
    merges = value["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    assert "order" in Tokenizer(Inner.from_str(json.dumps(value)), EOD).slow_because


def test_gpt2_form_of_the_pre_tokenizer_is_known():
    tokenizer = changed(lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)))
    assert tokenizer.slow_because == ""
    texts = [*TEXTS, *AWKWARD]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_bad_files(tmp_path, small):
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    (tmp_path / "run/tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no tokenizer\.json\nhint: its folder .*run/tokenizer has one"):
        load_tokenizer(tmp_path / "run")
    with pytest.raises(DataError, match=r"folder .* has no tokenizer\.json\nhint: copy it"):
        load_tokenizer(tmp_path)
    (tmp_path / "a.json").write_text('{"some": "json"}')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "a.json")
    small.save(tmp_path)
    with pytest.raises(UserError, match="no token 'END'"):
        load_tokenizer(tmp_path, eod_token="END")
    with pytest.raises(UserError, match="has no effect"):
        load_tokenizer(tmp_path, pattern="gpt2")
    inner = Inner(models.WordLevel({"one": 0}, unk_token="one"))
    inner.save(str(tmp_path / "b.json"))
    with pytest.raises(UserError, match="which token ends a document"):
        load_tokenizer(tmp_path / "b.json")


@pytest.mark.slow
def test_a_million_blanks_in_a_row_are_encoded(small):
    """They overflow the stack of tiktoken, which encodes in bulk."""
    text = "a" + " " * 1_000_000 + "b"
    assert small.encode_batch([text, "plain"]) == [small.encode(text), small.encode("plain")]
