"""Two versions made ready for a comparison: what is trained on is not held out, samples are equal for equal sets."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from planted_documents import edited, prose

from smalti.base.errors import DataError
from smalti.config.build import BuildConfig
from smalti.data.build.job import build
from smalti.data.prepare.versions.prepare import Version, prepare


def built(folder: Path, name: str, texts: dict[str, str], **changes) -> Version:
    """A built set of these documents, none of which is dropped."""
    (folder / name).mkdir()
    rows = (json.dumps({"id": document, "text": text}) + "\n" for document, text in texts.items())
    (folder / name / "a.jsonl").write_text("".join(rows))
    inputs = [{"path": str(folder / name), "name": "docs", "rules": ["none"]}]
    plain = {"name": name, "inputs": inputs, "output": str(folder / f"{name}-set"), "workers": 1, "clean": False}
    build(BuildConfig.model_validate({**plain, "dedup": "none", "pii": "keep", "heldout_frac": 0.3, **changes}))
    return Version.of(str(folder / f"{name}-set"))


def names(version: Version, split: str) -> set[str]:
    return {name.partition("/")[2] for name, _ in version.rows(split)}


def texts_of(folder: Path, name: str, split: str) -> list[str]:
    return pq.read_table(folder / "documents" / name / f"{split}.parquet").column("text").to_pylist()


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    rng = random.Random(1)
    return {f"d{i}": prose(rng, n_sentences=20) for i in range(60)}


def test_documents_that_the_other_version_trains_on_are_left_out_and_counted(tmp_path, documents):
    first = built(tmp_path, "a", documents)
    held = sorted(names(first, "heldout"))
    # The same split by id; of three held-out documents the other version trains on a copy, a near copy, other blanks.
    rng = random.Random(2)
    plants = {
        "copy": documents[held[0]],
        "near": edited(rng, documents[held[1]]),
        "blanks": documents[held[2]].replace(" ", "  "),
    }
    second = built(tmp_path, "b", documents | plants, seed=5, heldout_frac=0.0)  # trains on all
    facts = prepare(tmp_path / "all", {"A": first, "B": first}, None, 1 << 30)
    assert list(facts["heldout"]) == ["A"]
    assert facts["heldout"]["A"]["also_of"] == ["B"]
    assert facts["heldout"]["A"]["documents"] == len(held)
    with pytest.raises(DataError, match=f"A has {len(held)}, all of them trained on") as caught:
        prepare(tmp_path / "none", {"A": first, "B": second}, None, 1 << 30)
    assert "--heldout" in caught.value.hint
    kept = {name: text for name, text in documents.items() if name not in held}
    other = built(tmp_path, "c", kept | plants, seed=5, heldout_frac=0.0)
    facts = prepare(tmp_path / "some", {"A": first, "B": other}, None, 1 << 30)
    entry = facts["heldout"]["A"]
    assert (entry["trained_on"], entry["near_trained"], entry["documents"]) == (2, 1, len(held) - 3)
    assert set(texts_of(tmp_path / "some", "A", "heldout")) == {documents[name] for name in held[3:]}
    assert "B" not in facts["heldout"]


def test_a_document_of_the_same_name_is_the_same_document(tmp_path, documents):
    first = built(tmp_path, "a", documents)
    cleaned = {name: f"{text[:200]} and so on" for name, text in documents.items()}
    second = built(tmp_path, "b", cleaned, heldout_frac=0.0)
    with pytest.raises(DataError, match="all of them trained on"):
        prepare(tmp_path / "out", {"A": first, "B": second}, None, 1 << 30)


def test_samples_are_of_the_limit_and_the_same_in_both(tmp_path, documents):
    first = built(tmp_path, "a", documents)
    second = built(tmp_path, "b", documents | {"new": prose(random.Random(7), n_sentences=20)})
    half = first.n_bytes("train") // 2
    facts = prepare(tmp_path / "out", {"A": first, "B": second}, None, half)
    sizes = [facts["versions"][name]["sampled_bytes"] for name in ("A", "B")]
    assert all(0.5 * half < size < 1.5 * half for size in sizes)
    sampled = [set(texts_of(tmp_path / "out", name, "train")) for name in ("A", "B")]
    assert len(sampled[0] & sampled[1]) >= len(sampled[0]) - 1  # "new" may move others across the limit


def test_further_heldout_text_is_a_set_a_file_or_a_folder(tmp_path, documents):
    versions = dict.fromkeys("AB", built(tmp_path, "a", documents, heldout_frac=0.0))
    rng = random.Random(8)
    texts = [prose(rng, n_sentences=20) for _ in range(3)]
    (tmp_path / "more").mkdir()
    for number, text in enumerate([*texts, documents["d7"]]):
        (tmp_path / "more" / f"{number}.txt").write_text(text)
    facts = prepare(tmp_path / "out", versions, str(tmp_path / "more"), 1 << 30)
    assert list(facts["heldout"]) == ["given"]
    assert (facts["heldout"]["given"]["documents"], facts["heldout"]["given"]["trained_on"]) == (3, 1)
    assert set(texts_of(tmp_path / "out", "given", "heldout")) == set(texts)
    another = built(tmp_path, "b", {f"n{i}": prose(rng) for i in range(30)})
    facts = prepare(tmp_path / "set", versions, another.folder, 1 << 30)
    assert facts["heldout"]["given"]["documents"] == another.documents("heldout") > 0
    with pytest.raises(DataError, match="holds no documents out"):
        prepare(tmp_path / "no", versions, versions["A"].folder, 1 << 30)
    with pytest.raises(DataError, match="no held-out text is left"):
        prepare(tmp_path / "none", versions, None, 1 << 30)
