"""Near-duplicate removal: `smalti data dedup` against datatrove, text-dedup and rensa on the same planted documents.

Every contender runs in its own process and environment, on the same cores, from the same Parquet files to a folder of
the documents that it keeps; its time is that of the whole process. Contenders take turns, and a ratio compares two
consecutive runs. Recall and precision are computed from the ids that were kept.

    make bench NAME=dedup                               100,000 documents, about 13 minutes on two cores
    make bench NAME=dedup ARGS='--documents 10000 --contenders smalti,datatrove'
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measured import Cost, measured
from paired import ratio_of
from peers import python_of
from record import RecordOption, record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from synthetic_corpus import PlantedDocument, Score, planted, score, write_parquet  # noqa: E402

SEED = 1
"""Seed of the documents; no test uses it, so that nothing is tuned to them."""

Command = Callable[[Path, Path, int], Sequence[str | Path]]
"""(documents, output folder, cores) -> command. The kept documents are in OUTPUT/kept or OUTPUT/documents."""


@dataclass(frozen=True)
class Contender:
    """A program with its settings. ``rounds``: fewer for slow programs, to bound the total time."""

    name: str
    settings: str
    rounds: int
    command: Command
    environment: str | None = None


@dataclass
class Result:
    """The results of all runs of a contender."""

    costs: list[Cost] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    n_kept: int = 0


def contenders() -> list[Contender]:
    """Return all contenders, ours first."""
    return [
        Contender("smalti", "3-word shingles, its defaults", 3, _smalti),
        Contender("datatrove", "5-grams, 14x8 (its default, FineWeb's)", 1, _datatrove(), "dedup-datatrove"),
        Contender(
            "datatrove-28x4",
            "3-grams, 28x4, words cut at blanks",
            2,
            _datatrove("--buckets", "28", "--hashes", "4", "--ngrams", "3", "--words", "blanks"),
            "dedup-datatrove",
        ),
        Contender("text-dedup", "5-grams, threshold 0.7 (its default), xxh3", 1, _text_dedup(), "dedup-text-dedup"),
        Contender(
            "text-dedup-50x5", "5-grams, 50x5, xxh3", 1, _text_dedup("--b", "50", "--r", "5"), "dedup-text-dedup"
        ),
        Contender("rensa", "5-grams, 16x8, 0.8 (its README)", 3, _rensa(), "dedup-rensa"),
        Contender(
            "rensa-32x4",
            "5-grams, 32x4, 0.45",
            3,
            _rensa("--bands", "32", "--threshold", "0.45"),
            "dedup-rensa",
        ),
    ]


def _smalti(documents: Path, output: Path, cores: int) -> Sequence[str | Path]:
    config = output.with_suffix(".yaml")
    config.write_text(json.dumps({"documents": str(documents), "output": str(output)}))
    return [sys.executable, "-m", "smalti", "data", "dedup", config]


def _datatrove(*settings: str) -> Command:
    return lambda documents, output, cores: [
        python_of("dedup-datatrove"),
        ROOT / "bench" / "peers" / "dedup_datatrove.py",
        *(documents / "documents", output, "--cores", str(cores), *settings),
    ]


def _text_dedup(*settings: str) -> Command:
    return lambda documents, output, cores: [
        *(python_of("dedup-text-dedup"), "-m", "text_dedup.minhash", "--path", "parquet", "--split", "train"),
        *("--data_files", f"{documents}/documents/*/train.parquet", "--column", "text"),
        *("--output", output / "kept", "--cache_dir", output / "cache", "--num_proc", str(cores)),
        *("--hash_func", "xxh3", *settings),
    ]


def _rensa(*settings: str) -> Command:
    return lambda documents, output, cores: [
        python_of("dedup-rensa"),
        ROOT / "bench" / "peers" / "dedup_rensa.py",
        *(documents / "documents", output, "--cores", str(cores), *settings),
    ]


def kept_ids(output: Path) -> set[str]:
    """Return the ids of the documents in ``output``: JSON lines, Parquet or Arrow, as the contender writes them."""
    ids: set[str] = set()
    for path in sorted(output.rglob("*")):
        if "kept" in path.parts and path.suffix == ".jsonl":
            with path.open() as lines:
                ids.update(json.loads(line)["id"] for line in lines)
        elif "kept" in path.parts and path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source:
                ids.update(pa.ipc.open_stream(source).read_all().column("id").to_pylist())
        elif path.suffix == ".parquet" and {"kept", "documents"} & set(path.relative_to(output).parts):
            ids.update(pq.read_table(path, columns=["id"]).column("id").to_pylist())
    return ids


def run(
    chosen: Sequence[Contender], corpus: Sequence[PlantedDocument], folder: Path, cores: Sequence[int], rounds: int
) -> tuple[dict[str, Result], list[str]]:
    """Run the contenders in turn, in reverse order in every other round; returns results and the order of the runs."""
    documents = write_parquet(corpus, folder / "corpus", files=max(4, len(cores)))
    results = {contender.name: Result() for contender in chosen}
    order: list[str] = []
    all_ids = {document.id for document in corpus}
    for contender in _turns(chosen, rounds):
        output = folder / "output"
        print(f"running {contender.name} ...", file=sys.stderr, flush=True)
        command = contender.command(documents, output, len(cores))
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
        cost = measured(command, cores=cores, environment=quiet, folder=folder)
        result = results[contender.name]
        result.costs.append(cost)
        ids = kept_ids(output)
        if not ids <= all_ids:
            raise RuntimeError(f"{contender.name} wrote ids that are not among its documents")
        result.n_kept = len(ids)
        result.scores = score(corpus, all_ids - ids)
        print(f"  {cost.wall_s:.1f} s, {result.n_kept:,} kept", file=sys.stderr, flush=True)
        order.append(contender.name)
        shutil.rmtree(output)
    return results, order


def _turns(chosen: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    for number in range(rounds):
        for contender in reversed(chosen) if number % 2 else chosen:
            if number < contender.rounds or rounds > 3:
                yield contender


def ratios(results: dict[str, Result], order: list[str]) -> dict[str, dict[str, Any]]:
    """Return peer -> ratios of its time to ours; each of its runs is compared with our nearest run."""
    ours = [place for place, name in enumerate(order) if name == "smalti"]
    by_peer: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        if name == "smalti" or not ours:
            continue
        nearest = [
            min(range(len(ours)), key=lambda number: abs(ours[number] - place))
            for place, other in enumerate(order)
            if other == name
        ]
        by_peer[name] = {}
        for what in ("wall_s", "cpu_s"):
            slow = [getattr(cost, what) for cost in result.costs]
            fast = [getattr(results["smalti"].costs[number], what) for number in nearest]
            if len(slow) > 1:
                by_peer[name][what] = ratio_of(slow, fast, names=(name, "smalti")).figures()
            else:
                by_peer[name][what] = {"ratio": slow[0] / fast[0], "pairs": 1}
    return by_peer


def figures_of(contender: Contender, result: Result, n_documents: int, cores: int) -> dict[str, Any]:
    """Return the figures of one contender that are printed and recorded."""
    wall_s = statistics.median(cost.wall_s for cost in result.costs)
    cpu_s = statistics.median(cost.cpu_s for cost in result.costs)
    return {
        "settings": contender.settings,
        "runs": len(result.costs),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "documents_per_s": n_documents / wall_s,
        "documents_per_s_per_core": n_documents / wall_s / cores,
        "documents_per_cpu_s": n_documents / cpu_s,
        "peak_bytes": max(cost.peak_bytes for cost in result.costs),
        "kept": result.n_kept,
        "scores": {
            kind: {"planted": value.planted, "recall": value.recall, "precision": value.precision, "wrong": value.wrong}
            for kind, value in result.scores.items()
        },
        "walls_s": [cost.wall_s for cost in result.costs],
    }


def show(figures: dict[str, Any]) -> None:
    """Print two tables: speed, and recall and precision."""
    print(f"\n{figures['documents']:,} documents, {figures['text_bytes'] / 1e6:.0f} MB, {figures['cores']} cores\n")
    head = f"{'contender':17}{'docs/s':>9}{'/core':>8}{'wall s':>8}{'cpu s':>8}{'peak MB':>9}{'x wall':>8}{'x cpu':>8}"
    print(f"{head}  settings")
    for name, row in figures["contenders"].items():
        ratio = figures["ratios"].get(name)
        times = [f"{ratio[what]['ratio']:.1f}" if ratio else "1" for what in ("wall_s", "cpu_s")]
        print(
            f"{name:17}{row['documents_per_s']:9,.0f}{row['documents_per_s_per_core']:8,.0f}{row['wall_s']:8.1f}"
            f"{row['cpu_s']:8.1f}{row['peak_bytes'] / 1e6:9,.0f}{times[0]:>8}{times[1]:>8}  {row['settings']}"
        )
    print(f"\n{'recall / removed in error':27}" + "".join(f"{kind:>19}" for kind in ("exact", "edited", "all")), end="")
    print("".join(f"{kind:>13}" for kind in ("base", "boilerplate", "book", "sentence")))
    for name, row in figures["contenders"].items():
        scores = row["scores"]
        print(f"{name:27}", end="")
        for kind in ("exact", "edited", "all"):
            print(f"{scores[kind]['recall']:8.4f} /{scores[kind]['precision']:7.4f}  ", end="")
        print("".join(f"{scores[kind]['wrong']:13,}" for kind in ("base", "boilerplate", "book", "sentence")))
    print("\nexact, edited, all: recall / precision; the other kinds: documents removed in error")
    for name, ratio in figures["ratios"].items():
        wall = ratio["wall_s"]
        cpu = ratio["cpu_s"]
        spread = f" ({wall['ratio_p10']:.1f} to {wall['ratio_p90']:.1f})" if "ratio_p10" in wall else ""
        ours, theirs = (figures["contenders"][which]["scores"]["edited"]["recall"] for which in ("smalti", name))
        print(
            f"documents/s per core, smalti / {name}: {wall['ratio']:.1f}{spread}, pairs: {wall['pairs']}; CPU time, "
            f"{name} / smalti: {cpu['ratio']:.1f}; recall of edited copies {ours:.4f} and {theirs:.4f}"
        )


def main() -> None:
    """Print the tables; ``--record`` also writes bench/results/dedup.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contender.name for contender in contenders()]
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--contenders", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="slow contenders run in fewer; more than 3: all in each")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help="folder for documents and outputs; default: a temporary one")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/dedup.json")
    options = parser.parse_args()
    unknown = set(options.contenders.split(",")) - set(names)
    if unknown:
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [contender for contender in contenders() if contender.name in options.contenders.split(",")]
    for environment in {contender.environment for contender in chosen if contender.environment}:
        python_of(environment)
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    corpus = planted(options.documents, seed=SEED)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results, order = run(chosen, corpus, Path(folder), cores, options.rounds)
    figures = {
        "documents": len(corpus),
        "text_bytes": sum(len(document.text.encode()) for document in corpus),
        "cores": len(cores),
        "order": order,
        "contenders": {
            contender.name: figures_of(contender, results[contender.name], len(corpus), len(cores))
            for contender in chosen
        },
        "ratios": ratios(results, order),
    }
    show(figures)
    if options.record:
        print("wrote", record("dedup", figures))


if __name__ == "__main__":
    main()
