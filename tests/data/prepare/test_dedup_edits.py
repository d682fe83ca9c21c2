"""Which edits a deduplication finds, at its defaults and at bolder settings: the table of the guide.

Slow: it shows shares, so it needs many pairs and a run for each setting.
"""

import json
import random
from pathlib import Path

import pytest
import synthetic_corpus
from conftest import PROVE
from synthetic_corpus import PlantedDocument
from test_dedup_compared import APACHE, COMMENTS, GPL, code, different
from test_dedup_job import config_of, drops_of

from smalti.data.prepare.dedup.job import dedup

ROOT = Path(__file__).resolve().parents[3]

SETTINGS = {
    "the defaults": {},
    "`bands=56`": {"bands": 56},
    "`threshold=0.5 bands=56 rows=4`": {"threshold": 0.5, "bands": 56, "rows": 4},
    "`threshold=0.35 bands=84 rows=3`": {"threshold": 0.35, "bands": 84, "rows": 3},
    "`containment=0.9 rows=2`": {"containment": 0.9, "rows": 2},
}


def words(n: int, rng: random.Random) -> list[str]:
    return [f"w{int(50_000 ** rng.random())}" for _ in range(n)]


def edited(text: list[str], frac: float, rng: random.Random) -> list[str]:
    """``frac`` of the words replaced, deleted, or followed by a new one, in equal shares."""
    changed = {place: rng.randrange(3) for place in rng.sample(range(len(text)), max(1, round(frac * len(text))))}
    found: list[str] = []
    for place, word in enumerate(text):
        how = changed.get(place)
        found += (
            [word] if how is None else ([f"n{rng.randrange(50_000)}"], [], [word, f"n{rng.randrange(50_000)}"])[how]
        )
    return found


def in_a_frame(number: int, rng: random.Random) -> tuple[str, str]:
    page = different("page", number)
    body = page.splitlines()[1].split()
    return page, page.replace(" ".join(body), " ".join(edited(body, 0.04, rng)))


def changed_cell(number: int, rng: random.Random) -> tuple[str, str]:
    rows = different("rows", number).splitlines()
    other = list(rows)
    other[rng.randrange(len(rows))] = "row is missing"
    return "\n".join(rows), "\n".join(other)


def relicensed(number: int, rng: random.Random) -> tuple[str, str]:
    text = code(rng, 8)
    comment = COMMENTS[rng.choice(("hash", "slashes", "block", "html", "dashes"))]
    return comment(APACHE) + text, rng.choice(("", comment(GPL), comment("SPDX-License-Identifier: MIT"))) + text


def pair_of(kind: str, number: int) -> tuple[str, str]:
    """A document and the same with an edit of this kind."""
    rng = random.Random(f"{kind} {number}")
    text = words(int(100 * 10 ** rng.random()), rng)
    whole = " ".join(text)
    if kind.endswith("% of the words edited"):
        return whole, " ".join(edited(text, int(kind.split()[0]) / 100, rng))
    if kind.endswith("% of the words replaced in one place"):
        n = int(kind.split()[0]) * len(text) // 100
        at = rng.randrange(len(text) - n)
        return whole, " ".join([*text[:at], *words(n, rng), *text[at + n :]])
    if kind.startswith("a new passage"):
        return whole, " ".join([*text, *words(int(kind.split()[-2]) * len(text) // 100, rng)])
    if kind == "the first half of a document":
        return whole, " ".join(text[: len(text) // 2])
    if kind == "paragraphs in another order":
        pieces = [text[at : at + 50] for at in range(0, len(text), 50)]
        return whole, "\n\n".join(" ".join(piece) for piece in rng.sample(pieces, len(pieces)))
    if kind == "case, punctuation, layout":
        return whole, "".join(rng.choice((word, word.upper())) + rng.choice((" ", ", ", ".\n")) for word in text)
    if kind == "characters nobody sees inside words":
        return whole, " ".join(word[:1] + rng.choice("\u200b\u00ad\u200d\ufeff") + word[1:] for word in text)
    return {
        "code under another licence header": relicensed,
        "one word of 25 in a page under 109 words of shared frame": in_a_frame,
        "one row of a repetitive table": changed_cell,
    }[kind](number, rng)


KINDS = (
    "case, punctuation, layout",
    "characters nobody sees inside words",
    "code under another licence header",
    "paragraphs in another order",
    "2 % of the words edited",
    "5 % of the words edited",
    "7 % of the words edited",
    "10 % of the words edited",
    "15 % of the words edited",
    "20 % of the words edited",
    "20 % of the words replaced in one place",
    "a new passage at the end, 25 %",
    "a new passage at the end, 50 %",
    "the first half of a document",
    "one word of 25 in a page under 109 words of shared frame",
    "one row of a repetitive table",
)


@pytest.mark.slow
def test_which_edits_are_found(tmp_path, proof, record):
    n = proof(short=40, full=500)
    documents, n_unrelated = [], n * 4
    for kind in KINDS:
        for number in range(n):
            pair = zip("ab", pair_of(kind, number), strict=True)
            documents += [PlantedDocument(f"{kind}/{number:04d}{side}", text, kind) for side, text in pair]
    share = {"base": 0.6, "boilerplate": 0.4}
    documents += [
        PlantedDocument(f"unrelated/{one.id}", one.text, "unrelated")
        for one in synthetic_corpus.planted(n_unrelated, seed=11, share=share)
    ]
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c")
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    wrong = {}
    for number, (name, setting) in enumerate(SETTINGS.items()):
        if not (PROVE or number in (0, 2)):
            continue
        dedup(config_of(folder, tmp_path / f"{number}", alarm_frac=1, **setting))
        gone = drops_of(tmp_path / f"{number}")
        for kind in KINDS:
            pairs = [gone.keys() & {f"{kind}/{i:04d}a", f"{kind}/{i:04d}b"} for i in range(n)]
            found[kind][name] = sum(map(bool, pairs)) / n
        wrong[name] = sum(name.startswith("unrelated/") for name in gone)
    record("dedup-edits", {"pairs_of_each": n, "unrelated": n_unrelated, "found": found, "unrelated_removed": wrong})
    default = {kind: shares["the defaults"] for kind, shares in found.items()}
    assert min(default[kind] for kind in KINDS[:5]) >= 0.99, default
    assert default["5 % of the words edited"] >= 0.97, default
    assert default["one word of 25 in a page under 109 words of shared frame"] >= 0.95, default
    assert found["10 % of the words edited"]["`threshold=0.5 bands=56 rows=4`"] >= 0.8, found
    assert set(wrong.values()) == {0}, wrong


def test_the_guide_has_the_recorded_table():
    figures = json.loads((ROOT / "bench/results/dedup-edits.json").read_text())["figures"]
    guide = (ROOT / "docs/guides/near-duplicates.md").read_text()
    missing = [row for row in rows_of(figures["found"]) if row not in guide]
    assert not missing, "put these rows into the guide:\n" + "\n".join(missing)


def rows_of(found: dict[str, dict[str, float]]) -> list[str]:
    """The rows of the guide: what the defaults find, and the first setting that finds most, where it finds more."""
    rows = []
    for kind, shares in found.items():
        best = max(shares, key=lambda name: (round(shares[name], 3), -list(shares).index(name)))
        more = f"{best}: {shares[best]:.3f}" if best != "the defaults" else "" if shares[best] else "none"
        rows.append(f"| {kind} | {shares['the defaults']:.3f} | {more} |")
    return rows
