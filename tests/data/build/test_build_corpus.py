"""The planted corpus of bench/build_corpus.py, from the installed Python; and its checks see what is wrong."""

import random
import sys
from pathlib import Path

import pytest
from bench_script import ROOT

from smalti.config.build import BuildConfig
from smalti.data.build.job import build

sys.path.append(str(ROOT / "bench"))

import build_corpus
from build_planted import checks, embedded
from build_planted.document import jaccard, shingles
from build_planted.edits import edited_to
from build_planted.outcome import Outcome


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names that other systems do not allow")
def test_what_is_planted_is_found_and_nothing_else_goes(tmp_path: Path, proof) -> None:
    n = proof(short=900, full=4000)
    written = build_corpus.corpus(embedded.documents(n, 1), n, tmp_path, seed=1)
    build(BuildConfig.model_validate(build_corpus.recipe(tmp_path) | {"html": "tags", "workers": 1}))
    figures = build_corpus.examine(tmp_path, *written)
    assert figures["without_a_fate"] == []
    errors = {name: row for name, row in figures["plants"].items() if not row["is_within"]}
    # Docstrings are said to be English, and some are lists of words of other languages.
    assert set(errors) <= {"language"}, errors
    assert figures["plants"]["language"]["recall"] >= 0.97
    assert figures["edits_below_the_threshold"]["dropped_as_near"] == 0
    assert figures["twelve_words"]["dropped_for_13_other_words"] == 0


def dropped(rule: str, partner: str | None = None, reason: str = "") -> dict:
    return {"rule": rule, "partner": partner, "reason": reason, "score": 1.0}


def row(name: str, outcome: Outcome, key: checks.Key, items: list[str] | None = None) -> checks.Row:
    rows = {row.name: row for row in checks.table(outcome, key, [], items or ["thirteen words " * 7])}
    return rows[name]


def text(seed: int, n: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(n))


def test_a_missed_and_a_wrong_duplicate_are_seen() -> None:
    texts = {"a/1": text(1), "a/2": text(1), "a/3": text(2), "a/4": text(3)}
    key = [{"plant": "exact", "id": "a/2", "of": "a/1"}]
    right = Outcome({"a/2": dropped("dedup/exact", "a/1")}, {"a/1": text(1)}, {}, {**texts})
    assert row("exact duplicates", right, key).is_within
    missed = row("exact duplicates", Outcome({}, {"a/1": text(1), "a/2": text(1)}, {}, texts), key)
    assert (missed.recall, missed.precision) == (0.0, 1.0)
    wrong = Outcome({**right.drops, "a/4": dropped("dedup/exact", "a/3")}, {}, {}, texts)
    assert row("exact duplicates", wrong, key).precision == 0.5
    near = Outcome({"a/4": dropped("dedup/near", "a/3")}, {}, {}, texts)
    assert row("near-duplicates", near, []).precision == 0.0


def test_a_passage_that_stays_and_words_that_go_for_nothing_are_seen() -> None:
    passage = text(4, 61)
    texts = {f"a/{n}": f"{text(n)}\n{passage}\n{text(n + 50)}" for n in range(3)}
    key = [{"plant": "passage", "name": "p", "passage": passage, "id": name} for name in texts]
    cut = {name: before if name == "a/0" else before.replace(passage, "") for name, before in texts.items()}
    assert row("repeated passages", Outcome({}, cut, {}, texts), key).is_within
    stays = row("repeated passages", Outcome({}, cut | {"a/2": texts["a/2"]}, {}, texts), key)
    assert (stays.recall, stays.precision) == (0.5, 1.0)
    more = row("repeated passages", Outcome({}, cut | {"a/2": text(2, 60)}, {}, texts), key)
    assert more.recall == 1.0
    assert more.precision < 0.6


def test_contamination_is_thirteen_words_in_a_row() -> None:
    item = text(5, 30)
    share = {n: " ".join([text(7, 20), *item.split()[3 : 3 + n], text(8, 20)]) for n in (12, 13)}
    texts = {"a/12": share[12], "a/13": share[13].upper()}
    key = [{"plant": "contaminated", "id": "a/13"}]
    kept = Outcome({}, {"a/12": "", "a/13": ""}, {}, texts)
    assert row("contamination", kept, key, [item]).recall == 0.0
    both = Outcome({name: dropped("decontaminate") for name in texts}, {}, {}, texts)
    contaminated = row("contamination", both, key, [item])
    assert (contaminated.recall, contaminated.precision) == (1.0, 0.5)


@pytest.mark.parametrize("limits", [(0.7, 0.97), (0.4, 0.57)])
def test_edits_have_the_similarity_that_is_asked_for(limits: tuple[float, float]) -> None:
    rng = random.Random(6)
    fresh = text(99, 500).split()
    for seed in range(20):
        copy = edited_to(rng, text(seed), *limits, fresh)
        assert copy is not None
        assert limits[0] <= jaccard(shingles(text(seed)), shingles(copy)) <= limits[1]
