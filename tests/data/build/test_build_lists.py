"""What the user provides: lists of domains and words, and a fastText file of languages."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_documents import LANGUAGES, prose
from test_build_job import config, rows, write_jsonl

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.build import BlockConfig
from smalti.data.build import annotate
from smalti.data.build.clean.blocklists import Blocklists
from smalti.data.build.clean.language_model import LanguageModel
from smalti.data.build.job import build


@pytest.fixture
def rng():
    return random.Random(11)


MODEL = Path(__file__).parent.parent / "fixtures" / "languages.ftz"


def lists(folder: Path, max_words: int = 0, **entries: str) -> Blocklists:
    for name, text in entries.items():
        (folder / name).write_text(text)
    paths = {name: str(folder / name) for name in entries}
    return Blocklists.read(BlockConfig.model_validate({**paths, "max_words": max_words}))


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("https://spam.example/a", ("block/domain", "spam.example")),
        ("http://www.spam.example", ("block/domain", "spam.example")),
        ("https://deep.er.SPAM.example:8080/a?b", ("block/domain", "spam.example")),
        ("https://notspam.example/", None),
        ("https://spam.example.org/", None),
        ("https://good.example/ads/1.html", ("block/domain", "good.example/ads/")),
        ("https://good.example/adsl", None),
        ("https://good.example/buy-pills%20now", ("block/url-word", "pills")),
        ("https://good.example/pillsbury", None),
        ("https://[broken/pills", ("block/url-word", "pills")),
        ("spam.example/a.html", None),
        ("https://spam.example./", ("block/domain", "spam.example")),
    ],
)
def test_addresses(tmp_path, address, found):
    domains = "# from our own list\nspam.example\nhttps://www.good.example/ads/\n"
    assert lists(tmp_path, domains=domains, url_words="Pills # any\n").find(address, "text") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nothing of it.", None),
        ("It is PILLS, pills.", "pills"),
        ("caterpillars spills", None),
        ("einen größeren Größe", "größe"),
        ("a cheap\n  offer and pills", "cheap offer, pills"),
        ("これは禁止語です", "禁止語"),
        ("C++", "c++"),
        ("वह चलो", None),
    ],
)
def test_words(tmp_path, text, found):
    blocklists = lists(tmp_path, words="pills\nचल\nGröße\ncheap  offer\n禁止語\nc++\n")
    assert blocklists.find("id", text) == (found and ("block/word", found))


@given(st.lists(st.sampled_from(["bad", "worse", "good", "badly"]), max_size=12), st.integers(0, 3))
def test_more_words_than_are_allowed(tmp_path_factory, words, max_words):
    blocklists = lists(tmp_path_factory.mktemp("lists"), max_words, words="bad\nworse")
    is_dropped = blocklists.find("id", ", ".join(words)) is not None
    assert is_dropped == (sum(word in ("bad", "worse") for word in words) > max_words)


def test_a_build_with_lists(tmp_path, rng):
    texts = {f"https://{name}.example/": prose(rng) for name in ("a", "b")}
    texts["https://c.example/"] = prose(rng) + " Buy cheap pills now."
    write_jsonl(tmp_path / "in" / "pages.jsonl", texts)
    (tmp_path / "domains.txt").write_text("a.example\n")
    (tmp_path / "words.txt").write_text("cheap pills\n")
    block = {"domains": str(tmp_path / "domains.txt"), "words": str(tmp_path / "words.txt")}
    report = build(config(tmp_path, block=block))
    drops = rows(tmp_path / "out", "drops")
    assert {id_: row["rule"] for id_, row in drops.items()} == {
        "https://a.example/": "block/domain",
        "https://c.example/": "block/word",
    }
    assert drops["https://c.example/"]["reason"] == "it is on a list: cheap pills"
    assert report.values["build"]["steps"][1] == {
        "step": "block", "in": 3, "dropped": 2, "rules": {"block/domain": 1, "block/word": 1}
    }  # fmt: skip
    (tmp_path / "domains.txt").write_text("b.example\n")  # the same path, other entries
    build(config(tmp_path, block=block))
    assert "https://b.example/" in rows(tmp_path / "out", "drops")
    (tmp_path / "words.txt").write_text("# nothing\n")
    with pytest.raises(DataError, match="has no entries"):
        build(config(tmp_path, block=block))


def test_a_list_that_changes_during_a_build(tmp_path, rng, monkeypatch):
    write_jsonl(tmp_path / "in" / "pages.jsonl", {"a": prose(rng), "b": prose(rng) + " Buy cheap pills."})
    words = tmp_path / "words.txt"
    words.write_text("cheap pills\n")
    read = Blocklists.read.__func__

    calls = []

    def then_changed(kind, block):
        calls.append(block)
        if len(calls) == 2:  # the first is before the work begins
            words.write_text("the\n")
        return read(kind, block)

    with monkeypatch.context() as patch:
        patch.setattr(annotate.Blocklists, "read", classmethod(then_changed))
        with pytest.raises(RetryableError, match="a model or list changed"):
            build(config(tmp_path, block={"words": str(words)}))
    words.write_text("cheap pills\n")
    build(config(tmp_path, block={"words": str(words)}))
    assert set(rows(tmp_path / "out", "documents")) == {"a"}


def test_a_model_of_languages(tmp_path, rng):
    pytest.importorskip("fasttext")
    model = LanguageModel.load(str(MODEL))
    for language in LANGUAGES:
        found = [model.identify(prose(rng, language, 4)) for _ in range(20)]
        assert sum(name == language and score > 0.5 for name, score in found) >= 19
    assert model.identify("")[1] <= 1
    write_jsonl(tmp_path / "in" / "pages.jsonl", {language: prose(rng, language) for language in LANGUAGES})
    build(config(tmp_path, language_model=str(MODEL), languages=["de", "ja"]))
    assert set(rows(tmp_path / "out", "documents")) == {"de", "ja"}
    (tmp_path / "broken.ftz").write_bytes(MODEL.read_bytes()[100:])  # fastText itself does not notice a missing end
    for path in ("broken.ftz", "nowhere.ftz"):
        with pytest.raises(DataError, match="language_model"):
            build(config(tmp_path, language_model=str(tmp_path / path)))


def test_languages_that_only_a_model_knows(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="language 'ast_Latn' is not recognised"):
        config(tmp_path, languages=["ast_Latn"])
    config(tmp_path, languages=["ast_Latn"], language_model="glotlid.bin")
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(UserError, match="needs the package 'fasttext'"):
        LanguageModel.load(str(MODEL))
