"""The stream beside mosaicml-streaming and litData, on the same tokens: throughput, start, resume, memory, bytes.

    make bench NAME=stream                                  200M tokens, about 8 minutes on two cores; 1.6 GB in build/
    make bench NAME=stream ARGS='--tokens 4e6 --rounds 1 --contenders smalti'

Made-up documents of u16 tokens are written once by each contender's own writer; an untimed epoch of each must then hand
out the same rows, and a resume at 90 % must go on with the batch that the whole epoch has there. After that every
contender runs as a process of its own, by turns, its files in the page cache, on one thread of OpenMP. The epoch's
clock runs from the first batch to the last, so a slow start costs no throughput. Ours gives a full shuffle with every
block checked; the others their own shuffles (which mix less), and check nothing.
"""

import argparse
import compileall
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paired import ratio_of
from peers import python_of
from record import RecordOption, record

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN, BATCH_ROWS, VOCAB_SIZE, SEED = 4096, 64, 50_304, 17
RESUME_FRAC = 0.9


@dataclass(frozen=True)
class Contender:
    """A loader: its script and what its rows of the table are called."""

    name: str
    settings: str
    environment: str | None
    ways: tuple[str, ...]
    """How its epoch is taken: ``batches`` of u16 in one array, ``rows`` one by one, ``int64``: tensors of
    inputs and targets, ``microbatches``: all that our trainer takes, with positions and documents."""

    @property
    def script(self) -> Path:
        """What runs as the child."""
        return ROOT / "bench" / "peers" / f"stream_{self.name}.py"

    @property
    def python(self) -> str:
        """The interpreter of its environment."""
        return str(python_of(self.environment)) if self.environment else sys.executable


CONTENDERS = (
    Contender("smalti", "full shuffle, every block checked", None, ("batches", "int64", "microbatches")),
    Contender("mosaic", "py1e, its default; nothing checked", "stream-mosaic", ("batches", "rows", "int64")),
    Contender("litdata", "chunks and blocks of 256; nothing checked", "stream-litdata", ("batches", "rows", "int64")),
)


class Bench:
    """One set of tokens in all forms, and the turns over it."""

    def __init__(self, folder: Path, rows: int, seq_len: int) -> None:
        self.folder, self.rows, self.seq_len = folder, rows, seq_len
        self.steps = rows // BATCH_ROWS

    def job(self, contender: Contender, do: str, **more: Any) -> dict[str, Any]:
        """What the child is told."""
        return {
            "do": do,
            "as": "batches",
            "tokens": str(self.folder / "tokens.npy"),
            "folder": str(self.folder / contender.name),
            "rows": self.rows,
            "seq_len": self.seq_len,
            "batch_rows": BATCH_ROWS,
            "vocab_size": VOCAB_SIZE,
            "step": 0,
            "state": None,
            "resume_step": int(RESUME_FRAC * self.steps),
            "save": str(self.folder / f"{contender.name}.state.json"),
            **more,
        }

    def ask(self, contender: Contender, job: dict[str, Any]) -> dict[str, Any]:
        """Run the contender's script; its notes."""
        return ask(contender.python, contender.script, job, self.folder)

    def resume(self, contender: Contender) -> dict[str, Any]:
        """The first batch after a resume from the state that the check wrote."""
        state = str(self.folder / f"{contender.name}.state.json")
        step = int(RESUME_FRAC * self.steps)
        return self.ask(contender, self.job(contender, "first", step=step, state=state))


def ask(python: str, script: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one child to its end, with a home and a temporary folder of its own; its notes, and which files it left."""
    home, temporary = folder / "home", folder / "tmp"
    for place in (home, temporary):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    before = set(os.listdir("/dev/shm"))
    quiet = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    job["asked_s"] = time.monotonic()
    done = subprocess.run(
        [python, "-W", "ignore", str(script), json.dumps(job)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name}, {job['do']}: ended with {done.returncode}\n{done.stderr[-4000:]}")
    notes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    left = sorted(set(os.listdir("/dev/shm")) - before)
    notes["shm_left"] = [name for name in left if not name.startswith("sem.")]
    notes["files_left"] = sum(path.is_file() for top in (home, temporary) for path in top.rglob("*"))
    for name in left:
        if python != sys.executable and re.match(r"\d{6}_", name):  # names of mosaicml-streaming: what it left behind
            Path("/dev/shm", name).unlink(missing_ok=True)
    return notes


def compiled() -> None:
    """Bytecode of ours lies ready, as after an installation; children write none."""
    compileall.compile_dir(ROOT / "smalti", quiet=2)


def make_tokens(path: Path, n_tokens: int) -> None:
    """u16 ids on disk: documents of log-normal length (median 420), low ids far more often, 0 closes a document."""
    random = np.random.default_rng(SEED)
    tokens = np.empty(n_tokens, dtype=np.uint16)
    for begin in range(0, n_tokens, 1 << 22):
        n = min(1 << 22, n_tokens - begin)
        tokens[begin : begin + n] = 1 + (VOCAB_SIZE - 2) * random.random(n, dtype=np.float32) ** 4
    lengths = np.maximum(8, random.lognormal(np.log(420), 1.1, n_tokens // 300 + 10)).astype(np.int64)
    ends = np.cumsum(lengths)
    tokens[ends[ends < n_tokens]] = 0
    tokens[-1] = 0
    np.save(path, tokens)


def prepare(bench: Bench, chosen: Sequence[Contender]) -> dict[str, int]:
    """Everybody's files, made where they are missing or older than their writer; name -> bytes on disk. All agree."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    tokens = bench.folder / "tokens.npy"
    if not tokens.exists():
        make_tokens(tokens, bench.rows * bench.seq_len + 1)
    found = {}
    for contender in chosen:
        stamp, folder = bench.folder / f"{contender.name}.json", bench.folder / contender.name
        key = writer_key(contender)
        if not stamp.exists() or json.loads(stamp.read_text())["key"] != key:
            print(f"writing the tokens for {contender.name} ...", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            bench.ask(contender, bench.job(contender, "make"))
            stamp.write_text(json.dumps({"key": key}))
        found[contender.name] = check(bench, contender)
    for name, one in found.items():
        if (one["rows"], one["digest"]) != (bench.rows, found[chosen[0].name]["digest"]):
            raise RuntimeError(f"an epoch of {name} has {one['rows']:,} rows or others than {chosen[0].name}'s")
    return {one.name: bytes_on_disk(bench.folder / one.name) for one in chosen}


def writer_key(contender: Contender) -> str:
    """Changes with whatever may change the files: the peer's pins and script, or our writer."""
    paths = [contender.script]
    if contender.environment:
        paths.append(ROOT / "bench" / "peers" / f"{contender.environment}.txt")
    else:
        paths += sorted((ROOT / "smalti" / "data" / "tokens").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def check(bench: Bench, contender: Contender) -> dict[str, Any]:
    """An untimed epoch: which rows, and whether a resume goes on where it should."""
    notes = bench.ask(contender, bench.job(contender, "check"))
    if bench.resume(contender)["first_batch"] != notes["resume_batch"]:
        raise RuntimeError(f"{contender.name} resumes with another batch than the whole epoch has there")
    return notes


def bytes_on_disk(folder: Path) -> int:
    """Sizes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Bring all files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def turns(bench: Bench, chosen: Sequence[Contender], rounds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """name -> work (``batches``, ``rows``, ``int64``, ``resume``) -> notes of each round; the order alternates."""
    notes: dict[str, dict[str, list[dict[str, Any]]]] = {one.name: {} for one in chosen}
    for number in range(rounds):
        for contender in reversed(chosen) if number % 2 else chosen:
            print(f"round {number + 1} of {rounds}: {contender.name} ...", file=sys.stderr, flush=True)
            warm(bench.folder / contender.name)
            for way in contender.ways:
                found = bench.ask(contender, bench.job(contender, "epoch", **{"as": way}))
                notes[contender.name].setdefault(way, []).append(found)
            notes[contender.name].setdefault("resume", []).append(bench.resume(contender))
    return notes


# ---- figures --------------------------------------------------------------------------------------------------------


def tokens_per_s(bench: Bench, way: str) -> Callable[[dict[str, Any]], float]:
    """Tokens a second between the first batch and the last."""
    tokens = bench.seq_len * (1 if way == "rows" else BATCH_ROWS)
    return lambda note: float(note["batches_timed"] * tokens / note["epoch_s"])


def sizes(files: str) -> Callable[[dict[str, Any]], float]:
    """Bytes of the files that a note lists."""
    return lambda note: float(sum(note[files].values()))


ROWS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s, u16 batches", "batches", "M"),
    ("tokens/s, rows one by one", "rows", "M"),
    ("tokens/s, int64 inputs and targets", "int64", "M"),
    ("tokens/s, those with positions and documents", "microbatches", "M"),
    ("first batch, from the constructor", "first_s", "ms"),
    ("first batch, from process start", "first_from_process_s", "ms"),
    ("resume at 90 %, from the constructor", "resume first_s", "ms"),
    ("resume at 90 %, from process start", "resume first_from_process_s", "ms"),
    ("resident memory above imports, end of epoch", "resident_bytes", "MB"),
    ("of it without a file behind it", "private_bytes", "MB"),
    ("highest resident memory above imports", "peak_bytes", "MB"),
    ("imports alone, resident", "bare_bytes", "MB"),
    ("files written by the first batch", "files_at_first", "count"),
    ("files left at the end", "files_left", "count"),
    ("/dev/shm at the first batch", "shm_at_first", "kB"),
    ("/dev/shm left at the end", "shm_left", "count"),
)
"""Name, which figure, in which unit it is printed; more is better only for tokens/s."""


def values(bench: Bench, what: str, notes: dict[str, list[dict[str, Any]]]) -> list[float]:
    """One figure of all rounds; empty where the contender has none."""
    if what in ("batches", "rows", "int64", "microbatches"):
        return [tokens_per_s(bench, what)(note) for note in notes.get(what, [])]
    way, _, field = what.rpartition(" ")
    of = notes[way or "batches"]
    if field == "shm_at_first":
        return [sizes(field)(note) for note in of]
    return [float(len(note[field]) if isinstance(note[field], list | dict) else note[field]) for note in of]


def figures_of(bench: Bench, notes: Any, disk: dict[str, int], rounds: int) -> dict[str, Any]:
    """What is printed and recorded."""
    table: dict[str, dict[str, Any]] = {}
    for name, what, unit in ROWS:
        table[name] = {"unit": unit}
        ours = values(bench, what, notes["smalti"]) if "smalti" in notes else []
        # one by one, a row of ours would be a view of the batch: the batches stand beside the others' rows
        ours = ours or (values(bench, "batches", notes["smalti"]) if "smalti" in notes else [])
        for contender, of in notes.items():
            found = ours if contender == "smalti" else values(bench, what, of)
            if not found:
                continue
            one = {"median": statistics.median(found), "all": found}
            if contender != "smalti" and len(ours) > 1 and min(ours) > 0 and min(found) > 0:
                slow, fast = (ours, found) if unit == "M" else (found, ours)
                one["ours_better"] = ratio_of(slow, fast, names=(contender, "smalti")).figures()
            table[name][contender] = one
    table["bytes on disk"] = {"unit": "MB", **{name: {"median": size} for name, size in disk.items()}}
    tokens = bench.rows * bench.seq_len
    return {"tokens": tokens, "seq_len": bench.seq_len, "batch_rows": BATCH_ROWS, "rounds": rounds, "table": table,
            "settings": {one.name: one.settings for one in CONTENDERS if one.name in notes}}  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    """The table: medians, and how many times better ours is, with the spread over the rounds."""
    scale = {"M": 1e-6, "ms": 1e3, "MB": 1e-6, "kB": 1e-3, "count": 1}
    names = list(figures["settings"])
    print(f"\n{figures['tokens']:,} tokens, rows of {figures['seq_len']:,}, {figures['rounds']} rounds")
    for name, text in figures["settings"].items():
        print(f"  {name}: {text}")
    print(
        f"\n{'':53}"
        + "".join(f"{name:>12}{'ours better':>24}" if name != "smalti" else f"{name:>12}" for name in names)
    )
    for row, cells in figures["table"].items():
        unit = cells["unit"]
        line = f"{row + (', ' + unit if unit != 'count' else ''):53}"
        for name in names:
            if name not in cells:
                continue
            line += f"{cells[name]['median'] * scale[unit]:12,.1f}"
            ratio = cells[name].get("ours_better")
            if name != "smalti":
                spread = f"{ratio['ratio']:.2f} ({ratio['ratio_p10']:.2f} to {ratio['ratio_p90']:.2f})" if ratio else ""
                line += f"{spread:>24}"
        print(line)


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/stream.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in CONTENDERS]
    parser.add_argument("--tokens", type=float, default=2e8)
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--contenders", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the tokens are kept for the next time; absent: build/bench-stream")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/stream.json")
    options = parser.parse_args()
    unknown = set(options.contenders.split(",")) - set(names)
    if unknown:
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [one for one in CONTENDERS if one.name in options.contenders.split(",")]
    rows = max(10, round(options.tokens / options.seq_len / BATCH_ROWS)) * BATCH_ROWS
    folder = Path(options.folder or ROOT / "build" / "bench-stream") / f"{rows}x{options.seq_len}"
    bench = Bench(folder, rows, options.seq_len)
    compiled()
    disk = prepare(bench, chosen)
    figures = figures_of(bench, turns(bench, chosen, options.rounds), disk, options.rounds)
    show(figures)
    if options.record:
        print("wrote", record("stream", figures))


if __name__ == "__main__":
    main()
