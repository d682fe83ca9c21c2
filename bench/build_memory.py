"""Memory and rate of `smalti data build` while the input grows from 1 to 10 GB of documents.

    make bench NAME=build_memory                                  35 minutes on two idle cores, 40 GB of disk
    make bench NAME=build_memory ARGS='--gigabytes 0.1,0.3'       2 minutes

Documents of 200 to 1,300 words of a vocabulary of 50,000 (Zipf), in files of 64 MB of JSONL. An eighth are copies of an
earlier document of their file, of which half have a changed word. The recipe is the default one: languages, rules,
personal data, exact and near-duplicates. Memory is the highest sum of the proportional set sizes of all processes,
sampled. Linux. ``--record`` writes bench/results/build_memory.json.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measured import measured
from record import RecordOption, record

FILE_BYTES, VOCABULARY, SEED = 64_000_000, 50_000, 7
COPIES = 0.125


def vocabulary(draw: np.random.Generator) -> list[str]:
    """Return words of two to nine letters, the shortest and so the most frequent first."""
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        for n in draw.integers(2, 10, 10_000):
            words["".join(letters[(draw.random(n) ** 1.6 * len(letters)).astype(int)])] = None
    return list(words)[:VOCABULARY]


def documents(draw: np.random.Generator, words: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield texts without end."""
    shares = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    earlier: list[list[str]] = []
    while True:
        if earlier and draw.random() < COPIES:
            text = list(earlier[draw.integers(len(earlier))])
            if draw.random() < 0.5:
                text[draw.integers(len(text))] = "changed"
        else:
            places = np.searchsorted(shares, draw.random(draw.integers(200, 1300)) * shares[-1])
            text = words[places].tolist()
            if len(earlier) < 500:
                earlier.append(text)
        ends = range(0, len(text), 14)
        yield "\n\n".join(" ".join(text[start : start + 14]).capitalize() + "." for start in ends)


def write_inputs(folder: Path, n_bytes: int) -> None:
    """Write files until the folder has ``n_bytes``; files that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    words = np.array(vocabulary(np.random.default_rng(SEED)))
    size = min(FILE_BYTES, n_bytes)
    for number in range(max(1, n_bytes // size)):
        path = folder / f"{number:05d}.jsonl"
        if path.exists():
            continue
        written = 0
        with open(path.with_suffix(".tmp"), "w") as file:
            for place, text in enumerate(documents(np.random.default_rng([SEED, number]), words)):
                written += file.write(json.dumps({"id": f"{number}-{place}", "text": text}) + "\n")
                if written >= size:
                    break
        os.replace(path.with_suffix(".tmp"), path)


def build(folder: Path, cores: list[int], dedup: str) -> dict[str, Any]:
    """Build a set from ``folder/in``; returns its cost."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: memory\ninputs: {folder / 'in'}\noutput: {folder / 'out'}\nworkers: {len(cores)}\ndedup: {dedup}\n"
    )
    command = [sys.executable, "-m", "smalti", "data", "build", str(recipe)]
    cost = measured(command, cores=cores, limit_s=5 * 3600)
    report = json.loads((folder / "out" / "report.json").read_text())
    counts = report["sources"]["in"]["train"]["documents"]
    n_bytes = sum(path.stat().st_size for path in (folder / "in").iterdir())
    for name in ("out", ".memory.steps"):
        shutil.rmtree(folder / name)
    rate = n_bytes / cost.cpu_s
    return {**cost.figures(), "input_bytes": n_bytes, "documents": counts["in"], "kept": counts["kept"],
            "bytes_per_core_s": rate}  # fmt: skip


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", default="1,10", help="sizes of the input, ascending")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--dedup", choices=["near", "exact", "none"], default="near", help="of the recipe")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/build_memory.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = []
        for gigabytes in map(float, options.gigabytes.split(",")):
            write_inputs(folder / "in", int(gigabytes * 1e9))
            rows.append(build(folder, sorted(os.sched_getaffinity(0)), options.dedup))
            row = rows[-1]
            print(f"{row['input_bytes'] / 1e9:6.2f} GB  {row['documents']:>9,} documents  {row['kept']:>9,} kept  "
                  f"peak {row['peak_bytes'] / 2**20:7,.0f} MiB  {row['wall_s']:7,.0f} s  "
                  f"{row['bytes_per_core_s'] / 1e6:.2f} MB/s a core", flush=True)  # fmt: skip
    first, last = rows[0], rows[-1]
    if last is not first:
        growth = (last["peak_bytes"] - first["peak_bytes"]) / (last["documents"] - first["documents"])
        print(f"{growth:,.0f} bytes of memory for each further document")
    if options.record:
        print("wrote", record("build_memory", {"runs": rows}))


if __name__ == "__main__":
    main()
