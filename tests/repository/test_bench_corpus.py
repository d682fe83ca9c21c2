"""The planted corpus is what its docstrings promise: known copies, unrelated rest, equal on every machine."""

import hashlib
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
import synthetic_corpus
from synthetic_corpus import PlantedDocument, planted, score, sentence_trap, write_parquet


@pytest.fixture(scope="module")
def corpus() -> list[PlantedDocument]:
    return planted(3000)


def by_id(documents: list[PlantedDocument]) -> dict[str, PlantedDocument]:
    return {document.id: document for document in documents}


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(left: str, right: str) -> float:
    a, b = shingles(left), shingles(right)
    return len(a & b) / len(a | b)


@pytest.mark.slow
def test_equal_arguments_give_equal_documents(corpus: list[PlantedDocument]) -> None:
    assert planted(200) == planted(200)
    assert planted(200, seed=1)[0].text != corpus[0].text
    digest = hashlib.sha256("".join(document.text for document in planted(200)).encode()).hexdigest()
    assert digest.startswith("7d9cf84fabc11167"), "measurements of before and after this change cannot be compared"


@pytest.mark.slow
def test_every_kind_is_there_in_its_share(corpus: list[PlantedDocument]) -> None:
    kinds = [document.kind for document in corpus]
    assert len(corpus) == 3000
    assert {kind: kinds.count(kind) for kind in synthetic_corpus.KINDS} == {
        "base": 2219, "exact": 300, "edited": 300, "boilerplate": 150, "book": 2, "sentence": 29,
    }  # fmt: skip
    assert [document.id for document in corpus] == sorted(document.id for document in corpus)
    lengths = np.array([len(document.text.split()) for document in corpus if document.kind == "base"])
    assert lengths.min() >= 50
    assert lengths.max() <= 2000
    assert 200 < np.median(lengths) < 240
    assert all(20_000 <= len(one.text.split()) <= 100_000 for one in corpus if one.kind == "book")


@pytest.mark.slow
def test_copies_are_copies(corpus: list[PlantedDocument]) -> None:
    found = by_id(corpus)
    copies = [document for document in corpus if document.kind in ("exact", "edited")]
    assert len({document.partner for document in copies}) == len(copies)
    for document in copies:
        assert document.partner is not None
        partner = found[document.partner]
        assert partner.kind == "base"
        assert partner.partner is None
        if document.kind == "exact":
            assert document.text == partner.text
        else:
            words = partner.text.split(), document.text.split()
            changed = sum(
                max(i2 - i1, j2 - j1)
                for tag, i1, i2, j1, j2 in SequenceMatcher(None, *words, autojunk=False).get_opcodes()
                if tag != "equal"
            )
            assert 0 < changed <= max(1, round(0.05 * len(words[0])) + 2)


def test_the_rest_is_unrelated(corpus: list[PlantedDocument]) -> None:
    for kind, most in (("base", 0.02), ("boilerplate", 0.3), ("book", 0.05)):
        some = [document.text for document in corpus if document.kind == kind][:20]
        pairs = [(a, b) for i, a in enumerate(some) for b in some[:i]]
        assert max(similarity(a, b) for a, b in pairs) < most, kind


def test_boilerplate_is_shared() -> None:
    documents = planted(100, share={"base": 0.5, "boilerplate": 0.5})
    texts = [document.text for document in documents if document.kind == "boilerplate"]
    assert max(similarity(texts[0], text) for text in texts[1:]) > 0.1


def test_score_counts_either_side_of_a_pair() -> None:
    one = PlantedDocument("a", "x", "base")
    documents = [one, PlantedDocument("b", "x", "exact", "a"), replace(one, id="c"), replace(one, id="d", kind="book")]
    right = score(documents, {"a"})
    assert right["exact"].recall == right["exact"].precision == right["all"].recall == 1.0
    assert score(documents, {"b"}) == right
    both = score(documents, {"a", "b"})["exact"]
    assert (both.recall, both.precision) == (1.0, 0.5)
    assert score(documents, set())["all"].recall == 0.0
    wrong = score(documents, {"b", "d"})
    assert wrong["book"].precision == 0.0
    assert wrong["all"].precision == 0.5
    assert wrong["base"].precision == 1.0


def test_sentence_trap() -> None:
    documents = sentence_trap(50)
    sentence = documents[-1].text
    assert len(documents) == 101
    assert len(sentence.split()) == 61
    assert documents[0].text.split() == sentence.split() * 50
    assert all(sentence[:-1] in " ".join(document.text.split()) for document in documents)
    assert sum(document.text == sentence for document in documents) == 50
    assert score(documents, {f"alone-{i:06d}" for i in range(1, 50)})["sentence"].recall == 1.0


@pytest.mark.slow
def test_written_as_a_curation_leaves_it(tmp_path: Path, corpus: list[PlantedDocument]) -> None:
    from smalti.config.curate import TokenizeConfig
    from smalti.data.prepare.tokenize import tokenize

    folder = write_parquet(corpus[:200], tmp_path / "clean", files=2, heldout={corpus[0].id})
    config = TokenizeConfig(documents=str(folder), output=str(tmp_path / "tokens"), vocab_size=300)
    report = tokenize(config)
    counts = {source: {split: m.n_documents for split, m in of.items()} for source, of in report.manifests.items()}
    assert counts == {"part-0": {"train": 99, "heldout": 1}, "part-1": {"train": 100}}


def test_shares_must_add_up() -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        planted(100, share={"base": 0.5, "novel": 0.5})
    with pytest.raises(ValueError, match="need as many documents"):
        planted(100, share={"base": 0.3, "exact": 0.7})
