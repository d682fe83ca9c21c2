"""What deduplication and a quality classifier are worth: small models trained on versions of a set.

    make bench NAME=data_value                              both: about 12 minutes on one core
    make bench NAME=data_value ARGS='--only dedup --record --picture'
    make bench NAME=data_value ARGS='--tokens 40k --seeds 2 --characters 200000'    a test; its figures mean nothing

The text is that of Debian's documentation packages, cut into pages. ``smalti data build`` makes the versions and
``smalti data compare`` trains the model of the recipe ``demo`` on each for the same number of tokens, with the same
seeds, and measures held-out text that is in no version.

    dedup        a crawl with exact copies, near copies and passages that are on many pages (``data_value_study``), as
                 it is and after each step of deduplication; and what the models memorised of the crawl
    classifier   documentation and change logs, mixed; the half with the better scores of ``smalti data classifier``,
                 the other half, and a random half. The classifier was trained on other packages

The same command continues what was stopped; another ``--folder`` begins again. ``--record`` writes
bench/results/dedup_value.json and classifier_value.json.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from data_value_study.figures import pictures, report
from data_value_study.pages import PACKAGES, PASSAGES, Page, crawl, pages_of, taken, unpacked, write
from demo_runs import smalti
from record import ROOT, RecordOption, record

from smalti.base.chart import standalone
from smalti.data.documents.heldout import HELDOUT, split_of

PICTURES = ROOT / "docs" / "concepts" / "pictures"
SEED = 17
STEPS: dict[str, dict[str, Any]] = {
    "raw": {"dedup": "none"},
    "exact": {"dedup": "exact"},
    "near": {},
    "passages": {"repeats": "passages"},
    "semantic": {"repeats": "passages", "semantic": {"keep": 0.8}},
}
"""Versions of the crawl, and what their recipes have."""
HALVES = ("random", "dropped", "kept")
MODEL = (
    "train.parallel={ranks: 1, threads: 1, device: cpu}",
    "train.restart.hang_floor=30min",  # on a machine that does other things too a step may take long
)
"""Changes to the recipe."""
EVALUATION = {
    "dedup": ("train.eval_every=0.25run",),
    "classifier": ("train.eval_every=0.25run", "train.eval_tokens=16384"),  # of each of four held-out sets
}
MEMORISED, WINDOWS = ("A", "D"), 500
"""Versions whose models are measured for what they memorised (before and after), and the windows."""


def build(folder: Path, name: str, pages: str, **settings: Any) -> None:
    """Build a version of ``pages``; nothing but what ``settings`` say is changed or dropped."""
    inputs = [{"path": pages, "name": "pages", "rules": ["none"]}]
    same = {"clean": False, "pii": "keep", "workers": 1, "seed": SEED}
    (folder / f"{name}.yaml").write_text(
        json.dumps({"name": name, "inputs": inputs, "output": f"data/{name}", **same, **settings})
    )
    smalti(folder, "data", "build", f"{name}.yaml")


def split(pages: list[Page], n_characters: int) -> tuple[list[Page], list[Page]]:
    """Return pages to train on, of so many characters, and a third of them held out; no file is in both."""
    is_heldout = [split_of(page.file, seed=SEED, heldout_frac=0.25) == HELDOUT for page in pages]
    train = [page for page, held in zip(pages, is_heldout, strict=True) if not held]
    return train, taken((page for page, held in zip(pages, is_heldout, strict=True) if held), n_characters // 3)


def dedup(folder: Path, packages: Path, n_characters: int) -> list[str]:
    """Make the versions of the crawl."""
    pages = [page for name in ("python3.11-doc", "perl-doc", "git-doc") for page in pages_of(packages, name)]
    draw = random.Random(SEED)
    pages = [page for page in pages if not page.is_changelog]
    draw.shuffle(pages)
    pages = taken(pages, 2 * n_characters)
    write(folder / "all.jsonl", {f"{number} {page.file}": page.text for number, page in enumerate(pages)})
    build(folder, "all", "all.jsonl")
    names = pq.read_table(folder / "data/all/documents/pages/train.parquet").column("id").to_pylist()
    train, heldout = split([pages[int(name.partition(" ")[0])] for name in names], n_characters)
    write(folder / "heldout.jsonl", (page.text for page in heldout))
    chosen = taken(train[PASSAGES:], n_characters)
    write(folder / "crawl.jsonl", crawl(chosen, train[:PASSAGES], draw))
    for name, settings in STEPS.items():
        build(folder, name, "crawl.jsonl", **settings)
    return list(STEPS)


def classifier(folder: Path, packages: Path, n_characters: int) -> list[str]:
    """Train a classifier, score mixed pages, and make sets of three halves of them."""
    draw = random.Random(SEED)
    by_kind: dict[tuple[bool, bool], list[Page]] = {}
    for name in PACKAGES:
        for page in pages_of(packages, name):
            by_kind.setdefault((name in ("python3.11-doc", "glibc-doc"), page.is_changelog), []).append(page)
    for pages in by_kind.values():
        draw.shuffle(pages)
    for label, is_changelog in (("good", False), ("bad", True)):
        (folder / label).mkdir(exist_ok=True)
        examples = taken(by_kind[True, is_changelog], n_characters)
        write(folder / label / "pages.jsonl", (page.text for page in examples))
    smalti(folder, "data", "classifier", "train", "--good", "good", "--bad", "bad", "--output", "quality.npz")
    train, heldout = split(by_kind[False, False], n_characters)
    write(folder / "heldout.jsonl", (page.text for page in heldout))
    mixed = taken(train, n_characters) + taken(by_kind[False, True], n_characters)
    write(folder / "mixed.jsonl", (page.text for page in mixed))
    build(folder, "scored", "mixed.jsonl", quality_model="quality.npz", min_quality=0.0)
    scored = pq.read_table(folder / "data/scored/documents/pages/train.parquet").to_pylist()
    scored.sort(key=lambda row: row["quality"])
    shuffled = draw.sample(scored, len(scored))
    for half, rows in zip(HALVES, (shuffled, scored, scored[::-1]), strict=True):
        chosen = _half({row["id"]: row["text"] for row in rows})
        share = sum(not mixed[int(name)].is_changelog for name in chosen) / len(chosen)
        (folder / f"{half}.share").write_text(json.dumps(share))
        write(folder / f"{half}.jsonl", chosen)
        build(folder, half, f"{half}.jsonl", dedup="none", heldout_frac=0.1)
    return list(HALVES)


def _half(texts: dict[str, str]) -> dict[str, str]:
    """Return the first texts, of half of all characters."""
    left = sum(map(len, texts.values())) / 2
    chosen = {}
    for name, text in texts.items():
        if left <= 0:
            break
        chosen[name] = text
        left -= len(text)
    return chosen


EXPERIMENTS = {"dedup": dedup, "classifier": classifier}


def memorised(folder: Path, version: str) -> dict[str, Any]:
    """Measure what the first model of a version repeats of the text of the first version."""
    output = folder / "memorised" / version
    if not list(output.glob("evals/memorised/*/results.json")):
        run, tokens = f"compare/runs/{version}-0", "compare/tokens"
        smalti(folder, "export", run)
        smalti(
            folder, "eval", "memorised", run, "--train", f"{tokens}/A/train", "--heldout", f"{tokens}/given/heldout",
            "--windows", str(WINDOWS), "--output", f"memorised/{version}",
        )  # fmt: skip
    (results,) = output.glob("evals/memorised/*/results.json")
    tasks: dict[str, Any] = json.loads(results.read_text())["tasks"]
    return tasks


def measure(name: str, folder: Path, packages: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the versions unless they are there, compare them, and return the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = folder / "versions.json"
    if not versions.exists():
        names = EXPERIMENTS[name](folder, packages, options.characters)
        versions.write_text(json.dumps({"names": names, "packages": unpacked(packages)}))
    made = json.loads(versions.read_text())
    smalti(
        folder, "data", "compare", *(f"data/{version}" for version in made["names"]), *MODEL, *EVALUATION[name],
        "--heldout", "heldout.jsonl", "--tokens", options.tokens, "--seeds", str(options.seeds), "--output", "compare",
        "--yes",
    )  # fmt: skip
    figures: dict[str, Any] = made | json.loads((folder / "compare/compare.json").read_text())
    if name == "dedup":
        figures["memorised"] = {version: memorised(folder, version) for version in MEMORISED}
    else:
        shares = {half: json.loads((folder / f"{half}.share").read_text()) for half in HALVES}
        figures["documentation_frac"] = shares
    return figures


def main() -> None:
    """Print the comparisons; ``--record`` also writes the results, ``--picture`` the plots of the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=EXPERIMENTS, help="one of the experiments")
    parser.add_argument("--tokens", default="400k", help="training tokens of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--characters", type=int, default=450_000, help="of the different pages of a set")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-data-value"), help="keeps data and runs")
    parser.add_argument("--record", action=RecordOption, help="write the results")
    parser.add_argument("--picture", action="store_true", help="write the plots of the docs")
    options = parser.parse_args()
    parent = Path(options.folder).resolve()
    unpacked(parent / "packages")
    for name in [options.only] if options.only else EXPERIMENTS:
        figures = measure(name, parent / name, parent / "packages", options)
        print(report(figures))
        if options.picture:
            for file, chart in pictures(name, figures).items():
                (PICTURES / file).write_text(standalone(chart))
        if options.record:
            print("wrote", record(f"{name}_value", figures))


if __name__ == "__main__":
    main()
