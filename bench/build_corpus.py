"""`smalti data build` on real documents with plants: recall and precision of each, and whether anything else goes.

    make bench NAME=build_corpus ARGS='--cache FOLDER'     200,000 documents of Debian, 30 minutes on two busy cores
    make bench NAME=build_corpus ARGS='--embedded --documents 2000 --kills 0'           a minute, without network

Debian's documentation in five languages (and in others, which have to go), source packages and the descriptions of all
packages are downloaded into ``--cache``. Seeded: exact copies in other formats, edits of known similarity above and
below the threshold, passages in thousands of documents, personal data and what looks like it, parts of evaluation items
of 13 words and of 12, broken files, bombs and hostile names. One command builds the set. What it removed is compared
with the key and, planted or not, with independent measures: texts, exact Jaccard similarities, all 13-word and 50-word
windows, the languages of packages. A smaller corpus is built with one worker and with two, and by processes that are
killed at random moments. ``--record`` writes bench/results/build_corpus.json.
"""

import argparse
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured import measured
from record import ROOT, RecordOption, commit_of, record

sys.path[:0] = [str(ROOT / "tests" / "data"), str(ROOT / "tests" / "data" / "build")]

from build_planted import broken, checks, debian, embedded, kills, outcome, plants, write  # noqa: E402
from build_planted.document import Document, is_prose  # noqa: E402

SEED = 5
_ADDED_FRAC = 0.0285
"""Of the documents are copies and edits."""


def corpus(
    documents: list[Document], n: int, folder: Path, seed: int = SEED
) -> tuple[list[Document], checks.Key, list[str]]:
    """Write a corpus of about ``n`` documents into ``folder/in``, and its recipe; returns documents, key and items."""
    rng = random.Random(seed)
    real = sorted(documents, key=lambda document: document.key)
    rng.shuffle(real)
    real = real[: round(n * (1 - _ADDED_FRAC))]
    texts: list[str] = []
    for document in real:
        if len(texts) == len(broken.NAMES) + 20:
            break
        if document.kind == "prose" and document.language == "en" and is_prose(document.read(), "en"):
            texts.append(f"Kept under an odd name, number {len(texts)}.\n\n{_mixed(rng, document.read())}")
    planted, key = plants.plant(real, n, seed, folder)
    write.write(folder / "in", planted)
    key += broken.write(folder / "in" / broken.SOURCE, rng, texts)
    items = [json.loads(line)["question"] for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    (folder / "key.jsonl").write_text("".join(json.dumps(item) + "\n" for item in key))
    (folder / "recipe.yaml").write_text(json.dumps(recipe(folder)))
    return planted, key, items


def _mixed(rng: random.Random, text: str) -> str:
    """Words in another order: no near-duplicate of the document."""
    mixed = text.split()
    rng.shuffle(mixed)
    return " ".join(mixed)


def recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe: all steps but the quality classifier and similar documents."""
    return {
        "name": "corpus",
        "inputs": sorted(str(path) for path in (folder / "in").iterdir()),
        "output": str(folder / "out"),
        "work": str(folder / "work"),
        "languages": ["de", "en", "es", "fr", "ja"],
        "decontaminate": [str(folder / "evaluation.jsonl")],
        "repeats": "passages",
    }


def order_of(documents: list[Document]) -> dict[str, tuple[str, str, int]]:
    """Return document -> source, file and row in it."""
    places: dict[str, tuple[str, str, int]] = {}
    rows: dict[tuple[str, str], int] = {}
    for document in documents:
        if document.container is None:
            places[document.key] = (document.source, document.name, 0)
            continue
        file = (document.source, document.container)
        rows[file] = rows.get(file, 0) + 1
        places[document.key] = (*file, rows[file])
    return places


def examine(folder: Path, documents: list[Document], key: checks.Key, items: list[str]) -> dict[str, Any]:
    """Return the figures of a build that is finished."""
    finished = outcome.read(folder / "out", folder / "work" / "corpus" / "annotated", order_of(documents))
    rows = checks.table(finished, key, documents, items)
    far = [item["id"] for item in key if item["plant"] == "far"]
    clean = [item["id"] for item in key if item["plant"] == "clean"]
    return {
        "documents": len(finished.kept) + len(finished.drops),
        "kept": len(finished.kept),
        "text_bytes": sum(len(text.encode()) for text in finished.before.values()),
        "without_a_fate": finished.twice[:10],
        "plants": {row.name: row.figures() for row in rows},
        "edits_below_the_threshold": {
            "planted": len(far),
            "dropped_as_near": sum((outcome.rule_of(finished, name) or "").startswith("dedup/") for name in far),
        },
        "unsure_of_the_language": checks.unsure(finished, documents),
        "twelve_words": {
            "planted": len(clean),
            "dropped_for_13_other_words": sum(outcome.rule_of(finished, name) == "decontaminate" for name in clean),
        },
        "drops": _counted(finished),
        "rules": {rule: {"documents": len(names), "examples": random.Random(1).sample(names, min(6, len(names)))}
                  for rule, names in sorted(checks.others(finished).items())},
    }  # fmt: skip


def _counted(finished: outcome.Outcome) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in finished.drops.values():
        counts[row["rule"]] = counts.get(row["rule"], 0) + 1
    return dict(sorted(counts.items()))


def show(figures: dict[str, Any]) -> None:
    """Print the table, the errors, and some of what the rules of quality dropped."""
    print(
        f"\n{figures['documents']:,} documents, {figures['text_bytes'] / 1e6:.0f} MB of text, {figures['kept']:,} kept"
    )
    print(f"\n{'plant':28}{'planted':>9}{'found':>8}{'recall':>9}{'removed':>10}{'right':>9}{'precision':>10}  bound")
    for name, row in figures["plants"].items():
        bound = f"{row['bound'][0]:g}/{row['bound'][1]:g}" + ("" if row["is_within"] else "  MISSED")
        print(
            f"{name:28}{row['planted']:9,}{row['hits']:8,}{row['recall']:9.4f}{row['removed']:10,}{row['right']:9,}"
            f"{row['precision']:10.4f}  {bound}  ({row['unjudged']} not judged)"
        )
        for what in ("missed", "wrong"):
            for line in row[what][:5]:
                print(f"    {what}: {line!r}"[:230])
    for name in ("edits_below_the_threshold", "twelve_words", "unsure_of_the_language", "drops", "without_a_fate"):
        print(name, figures[name])
    for rule, entry in figures["rules"].items():
        print(f"\n{rule}: {entry['documents']:,}")
        for line in entry["examples"]:
            print("   ", ascii(line) if not line.isprintable() else line)


def _killed(documents: list[Document], n: int, n_kills: int, folder: Path) -> dict[str, Any]:
    """Build a smaller corpus with one and two workers and with kills, and compare the bytes."""
    folder.mkdir()
    written = corpus(documents, n, folder)
    path = folder / "recipe.yaml"
    seconds = {workers: kills.undisturbed(path, folder / f"whole-{workers}", folder / f"work-w{workers}", workers)
               for workers in (1, 2)}  # fmt: skip
    expected = kills.digests(folder / "whole-1")
    n_hit, moments, outputs = kills.killed(path, folder, n_kills, seconds[2], SEED)
    equal = [kills.digests(output) == expected for output in outputs]
    return {
        "documents": len(written[0]),
        "files": len(expected),
        "seconds": seconds,
        "two_workers_equal_one": kills.digests(folder / "whole-2") == expected,
        "kills": n_hit,
        "moments_s": [round(moment, 1) for moment in moments],
        "builds": len(outputs),
        "builds_with_equal_bytes": sum(equal),
    }


def main() -> int:
    """Build, print the table, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--cache", type=Path, help="folder for Debian's packages, about 5 GB")
    parser.add_argument("--embedded", action="store_true", help="documents of the installed Python, without a download")
    parser.add_argument("--kills", type=int, default=20, help="0: none, and no comparison of one and two workers")
    parser.add_argument("--kills-documents", type=int, default=4_000, help="documents of the corpus of the kills")
    parser.add_argument(
        "--part",
        choices=("all", "set", "check", "kills"),
        default="all",
        help="check: look again at the set that is in --folder",
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder", type=Path, help="folder for the corpus and the set, which stays; default: a temporary one"
    )
    parser.add_argument("--record", action=RecordOption, help="write bench/results/build_corpus.json")
    options = parser.parse_args()
    if not options.embedded and options.cache is None:
        parser.error("--cache FOLDER says where Debian's packages are kept; --embedded needs none")
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=options.folder is None or options.part == "check")

    def real(n: int) -> list[Document]:
        return embedded.documents(n, SEED) if options.embedded else debian.documents(options.cache.resolve())

    figures: dict[str, Any] = {}
    try:
        if options.part in ("all", "set"):
            written = corpus(real(options.documents), options.documents, folder)
            cost = measured(kills.command(folder / "recipe.yaml", f"workers={options.workers}"),
                            cores=sorted(os.sched_getaffinity(0)), folder=folder, limit_s=7200)  # fmt: skip
            print(f"built in {cost.wall_s:.0f} s", file=sys.stderr, flush=True)
            built = {**cost.figures(), "workers": options.workers, "built_commit": commit_of(ROOT)}
            (folder / "built.pickle").write_bytes(pickle.dumps((written, built)))
        if options.part != "kills":
            written, built = pickle.loads((folder / "built.pickle").read_bytes())
            figures |= {**examine(folder, *written), **built}
            show(figures)
        if options.part in ("all", "kills") and options.kills:
            small = options.kills_documents
            figures["interrupted"] = _killed(real(small), small, options.kills, folder / "kills")
            print("interrupted", figures["interrupted"])
        if options.record:
            print("wrote", record("build_corpus", figures))
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    within = all(row["is_within"] for row in figures.get("plants", {}).values()) and not figures.get("without_a_fate")
    same = figures.get("interrupted", {"builds": 0, "builds_with_equal_bytes": 0, "two_workers_equal_one": True})
    return 0 if within and same["builds"] == same["builds_with_equal_bytes"] and same["two_workers_equal_one"] else 1


if __name__ == "__main__":
    sys.exit(main())
