"""Similar documents: the order of choice against an enumeration, planted paraphrases, what is kept, equal bytes."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from smalti.base.errors import UserError
from smalti.config.build import BuildConfig
from smalti.config.load import from_dict
from smalti.data.build.job import build
from smalti.data.build.semantic import choose, drop, vectors
from smalti.data.build.semantic.choose import cosine, dropped_of, edges_of, scores
from smalti.data.build.semantic.vectors import SCALE, Terms, whole
from smalti.data.build.why import why

RNG = random.Random(11)
WORDS = ["".join(RNG.choices("bdfgklmnprstvz", k=2) + RNG.choices("aeiou", k=2)[:1] + RNG.choices("lmnrst", k=2))
         for _ in range(4000)]  # fmt: skip


def text_of(rng: random.Random, words: list[str], n_words: int = 160) -> str:
    """Sentences of these words, in any order."""
    chosen = rng.choices(words, k=n_words)
    return " ".join(f"The {' '.join(chosen[i : i + 8])} is in it." for i in range(0, n_words, 8))


def topic(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, 60)


def planted(rng: random.Random, n: int, n_paraphrased: int) -> dict[str, str]:
    """Documents on topics of their own, of some also one that says the same in another order with other words."""
    texts = {}
    for number in range(n):
        words = topic(rng)
        texts[f"d{number}"] = text_of(rng, words)
        if number < n_paraphrased:
            texts[f"p{number}"] = text_of(rng, words[:48] + rng.sample(WORDS, 12))
    return texts


def built(folder: Path, texts: dict[str, str], output: str = "out", **changes) -> Path:
    (folder / "in").mkdir(exist_ok=True)
    rows = [json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()]
    (folder / "in" / "a.jsonl").write_text("".join(rows))
    plain = {"name": output, "inputs": [{"path": str(folder / "in"), "rules": ["none"]}], "workers": 1}
    build(BuildConfig.model_validate({**plain, "output": str(folder / output), **changes}))
    return folder / output


def rows_of(folder: Path, kind: str) -> list[dict]:
    return [row for path in sorted((folder / kind).rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


def enumerated(matrix: np.ndarray, is_heldout: np.ndarray) -> list[float]:
    """The scores of ``choose.scores``, by looking at all pairs for every document that is taken."""
    result = dict.fromkeys(np.flatnonzero(is_heldout).tolist(), -2.0)
    if not result:
        total = [sum(float(row[dim]) for row in matrix) for dim in range(matrix.shape[1])]
        products = [sum(float(a) * b for a, b in zip(row, total, strict=True)) for row in matrix]
        result[products.index(max(products))] = -2.0
    similar = cosine(matrix, matrix)
    while len(result) < len(matrix):
        nearest = {i: max(similar[i][j] for j in result) for i in range(len(matrix)) if i not in result}
        chosen = min(nearest, key=lambda i: (nearest[i], i))
        result[chosen] = nearest[chosen]
    return [result[i] for i in range(len(matrix))]


def test_the_order_equals_an_enumeration_and_every_threshold_holds(proof):
    for case in range(proof(short=15, full=300)):
        rng = np.random.default_rng(case)
        n = int(rng.integers(2, 40))
        matrix = whole(rng.standard_normal((n, 8)).astype(np.float32)).astype(np.float32)
        matrix[rng.integers(0, n)] = matrix[0]  # an equal one
        is_heldout = rng.random(n) < rng.choice([0.0, 0.2])
        values, ranks = scores(matrix, is_heldout)
        assert values.tolist() == enumerated(matrix, is_heldout)
        assert np.all(np.diff(values[np.argsort(ranks[~is_heldout])]) >= 0) or is_heldout.any()
        similar = cosine(matrix, matrix)
        for n_drop in range(n):
            gone, threshold = dropped_of(values, ranks, np.zeros(n, np.int64), is_heldout, n_drop)
            assert gone.sum() == min(n_drop, int((values > -2).sum()))
            assert not gone[is_heldout].any()
            stay = np.flatnonzero(~gone)
            if threshold is None:
                continue
            assert all(similar[i][stay].max() >= threshold for i in np.flatnonzero(gone))
            trained = [i for i in stay if not is_heldout[i]]
            assert all(similar[i][j] <= threshold for i in trained for j in stay if i != j)


def test_large_clusters_are_split_and_edges_cover_all(monkeypatch):
    monkeypatch.setattr(choose, "GROUP_DOCUMENTS", 3)
    assert edges_of(np.array([0, 0, 0, 0, 1, 2, 2, 2])).tolist() == [0, 3, 4, 5, 8]


def test_products_of_vectors_are_exact():
    rng = np.random.default_rng(1)
    matrix = whole(rng.standard_normal((50, 128)).astype(np.float32) ** 5)
    exact = matrix.astype(np.int64) @ matrix.astype(np.int64).T
    assert exact.max() < 2**24
    assert np.array_equal(matrix.astype(np.float32) @ matrix.astype(np.float32).T, exact)
    lengths = np.sqrt((matrix.astype(np.float64) ** 2).sum(axis=1))
    assert np.allclose(lengths, SCALE, atol=6)


def test_the_reduction_is_that_of_an_exact_svd(monkeypatch):
    monkeypatch.setattr(vectors, "DIMS", 12)
    rng = random.Random(3)
    topics = [topic(rng) for _ in range(12)]
    terms = Terms.of([text_of(rng, topics[i % 12]) for i in range(60)])
    terms = terms.weighted(np.ones(1 << 16, np.float32))
    dense = np.zeros((60, 1 << 16), np.float32)
    dense[terms.rows, terms.buckets] = terms.values
    matrix = np.random.default_rng(0).standard_normal((1 << 16, 5), np.float32)
    assert np.allclose(terms.times(matrix), dense @ matrix, atol=1e-3)
    assert np.allclose(terms.transposed_times(matrix[:60]), dense.T @ matrix[:60], atol=1e-3)
    basis = vectors._basis(terms, seed=1)
    assert np.allclose(basis.T @ basis, np.eye(12), atol=1e-3)
    best = np.linalg.svd(dense, compute_uv=False)[:12]
    assert np.linalg.norm(dense @ basis) == pytest.approx(np.linalg.norm(best), rel=0.01)


def test_paraphrases_are_dropped_and_named(tmp_path):
    texts = planted(random.Random(5), 200, 40)
    folder = built(tmp_path, texts, semantic={"keep": 200 / 240})
    drops = {row["id"]: row for row in rows_of(folder, "drops")}
    assert len(drops) == 40
    assert {row["rule"] for row in drops.values()} == {"semantic"}  # they are no near-duplicates
    pairs = sum(row["partner"].partition("/")[2][1:] == name[1:] for name, row in drops.items())
    assert pairs >= 38
    record = json.loads((folder / "report.json").read_text())
    threshold = record["semantic"]["threshold"]
    assert min(row["score"] for row in drops.values()) >= threshold
    kept = {row["id"] for row in rows_of(folder, "documents")}
    assert {row["partner"].partition("/")[2] for row in drops.values()} <= kept
    steps = {step["step"]: step["dropped"] for step in record["build"]["steps"]}
    assert (steps["deduplicate"], steps["semantic"]) == (0, 40)
    assert "## Similar documents" in (folder / "report.md").read_text()
    name, row = next(iter(drops.items()))
    (fate,) = why(str(folder), name)
    assert (fate["step"], fate["limit"]["high"]) == ("semantic", threshold)
    assert f"in/{fate['partners'][0]['id']}" == row["partner"]


def test_held_out_documents_stay_and_what_is_near_them_goes(tmp_path):
    rng = random.Random(6)
    words = topic(rng)
    texts = {f"same{i}": text_of(rng, words) for i in range(30)} | planted(rng, 70, 0)
    folder = built(tmp_path, texts, heldout_frac=0.2, semantic={"keep": 0.7})
    record = json.loads((folder / "report.json").read_text())
    splits = record["sources"]["in"]
    assert splits["heldout"]["documents"]["dropped"] == 0
    n_train = splits["train"]["documents"]["in"]
    assert splits["train"]["documents"]["dropped"] == int(0.3 * n_train + 1e-9)
    heldout = pq.read_table(folder / "documents" / "in" / "heldout.parquet").column("id").to_pylist()
    held_of_topic = {f"in/{name}" for name in heldout if name.startswith("same")}
    assert held_of_topic
    dropped = [row for row in rows_of(folder, "drops") if row["id"].startswith("same")]
    assert len(dropped) == 30 - len(held_of_topic)
    assert {row["partner"] for row in dropped} <= held_of_topic


def test_texts_in_scripts_without_blanks_and_without_words_are_compared(tmp_path):
    rng = random.Random(7)
    characters = [chr(0x4E00 + i) for i in range(3000)]
    texts = {}
    for number in range(40):
        own = rng.sample(characters, 60)
        texts[f"d{number}"] = "。".join("".join(rng.choices(own, k=20)) for _ in range(12))
        if number < 8:
            texts[f"p{number}"] = "。".join("".join(rng.choices(own, k=20)) for _ in range(12))
    texts |= {"dots": "... ??? !!!", "dashes": "--- --- ---"}
    folder = built(tmp_path, texts, semantic={"keep": 42 / 50})
    drops = rows_of(folder, "drops")
    assert sum(row["partner"].partition("/")[2][1:] == row["id"][1:] for row in drops) >= 7
    assert not {"dots", "dashes"} & {row["id"] for row in drops}


@pytest.mark.slow  # pools of processes for each step
def test_processes_tasks_and_groups_do_not_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("smalti.data.build.shards._IN_PROCESS_BYTES", 0)
    monkeypatch.setattr("smalti.data.documents.parquet._GROUP_ROWS", 60)
    monkeypatch.setattr(drop, "_TASK_DOCUMENTS", 50)
    texts = planted(random.Random(8), 250, 50)
    one = built(tmp_path, texts, "one", semantic={"keep": 0.8})
    two = built(tmp_path, texts, "two", semantic={"keep": 0.8}, workers=2)
    assert everything(one) == everything(two)
    assert len(rows_of(one, "drops")) == 60


def test_few_documents_and_none_to_drop(tmp_path):
    folder = built(tmp_path, planted(random.Random(9), 3, 0), semantic={"keep": 0.9})
    assert len(rows_of(folder, "documents")) == 3
    assert json.loads((folder / "report.json").read_text())["semantic"]["threshold"] is None
    assert "dropped from cosine none" in (folder / "report.md").read_text()


@pytest.mark.parametrize("keep", [0, 1, 80, -0.1])
def test_a_fraction_that_keeps_all_or_none_is_an_error(keep):
    with pytest.raises(UserError, match=r"semantic\.keep"):
        from_dict(BuildConfig, {"name": "a", "inputs": ["in"], "output": "out", "semantic": {"keep": keep}})
