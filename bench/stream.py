"""Compares the stream with mosaicml-streaming and litData on the same tokens: throughput, start, resume, memory, bytes.

    make bench NAME=stream                                  200M tokens, about 8 minutes on two cores; 1.6 GB in build/
    make bench NAME=stream ARGS='--tokens 4e6 --rounds 1 --contenders smalti'

Synthetic documents of u16 tokens are written once by each contender's own writer; an untimed epoch of each must then
return the same rows, and a resume at 90 % must continue with the batch that the whole epoch has there. Then each
contender runs in its own process, in turn, with its files in the page cache and one OpenMP thread. An epoch is timed
from the first batch to the last, so a slow start does not reduce throughput. Ours does a full shuffle and checks every
block; the others do their own shuffles (which mix less), and check nothing.
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
    """A loader, its script and its environment."""

    name: str
    settings: str
    environment: str | None
    forms: tuple[str, ...]
    """The forms in which an epoch is measured: ``batches`` of u16 in one array, ``rows`` one by one, ``int64`` tensors
    of inputs and targets, ``microbatches`` of our trainer, with positions and documents."""

    @property
    def script(self) -> Path:
        """The script of the child process."""
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
    """One set of tokens in the formats of all contenders."""

    def __init__(self, folder: Path, rows: int, seq_len: int) -> None:
        self.folder = folder
        self.rows = rows
        self.seq_len = seq_len
        self.steps = rows // BATCH_ROWS

    def job(self, contender: Contender, do: str, **more: Any) -> dict[str, Any]:
        """Return the job description for a child process."""
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

    def run(self, contender: Contender, job: dict[str, Any]) -> dict[str, Any]:
        """Run the contender's script; returns its notes."""
        return run_child(contender.python, contender.script, job, self.folder)

    def resume(self, contender: Contender) -> dict[str, Any]:
        """Resume from the state that the check wrote; returns the notes of the first batch."""
        state = str(self.folder / f"{contender.name}.state.json")
        step = int(RESUME_FRAC * self.steps)
        return self.run(contender, self.job(contender, "first", step=step, state=state))


def run_child(python: str, script: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a child process with its own home and temporary folder; returns its notes, with the files that it left."""
    home = folder / "home"
    temporary = folder / "tmp"
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
    """Compile our bytecode, as an installation does; children write none."""
    compileall.compile_dir(ROOT / "smalti", quiet=2)


def make_tokens(path: Path, n_tokens: int) -> None:
    """Write u16 ids: documents of log-normal length (median 420), low ids far more often, 0 closes a document."""
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
    """Write the files of each contender, unless its writer has not changed, and check that all have the same rows.

    Returns name -> bytes on disk.
    """
    bench.folder.mkdir(parents=True, exist_ok=True)
    tokens = bench.folder / "tokens.npy"
    if not tokens.exists():
        make_tokens(tokens, bench.rows * bench.seq_len + 1)
    epochs = {}
    for contender in chosen:
        stamp = bench.folder / f"{contender.name}.json"
        folder = bench.folder / contender.name
        key = writer_key(contender)
        if not stamp.exists() or json.loads(stamp.read_text())["key"] != key:
            print(f"writing the tokens for {contender.name} ...", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            bench.run(contender, bench.job(contender, "make"))
            stamp.write_text(json.dumps({"key": key}))
        epochs[contender.name] = check(bench, contender)
    for name, epoch in epochs.items():
        if (epoch["rows"], epoch["digest"]) != (bench.rows, epochs[chosen[0].name]["digest"]):
            raise RuntimeError(f"an epoch of {name} ({epoch['rows']:,} rows) differs from that of {chosen[0].name}")
    return {contender.name: bytes_on_disk(bench.folder / contender.name) for contender in chosen}


def writer_key(contender: Contender) -> str:
    """Return a digest of everything that may change the files: the peer's pins and script, or our writer."""
    paths = [contender.script]
    if contender.environment:
        paths.append(ROOT / "bench" / "peers" / f"{contender.environment}.txt")
    else:
        paths += sorted((ROOT / "smalti" / "data" / "tokens").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def check(bench: Bench, contender: Contender) -> dict[str, Any]:
    """Run an untimed epoch, and check that a resume continues with the right batch; returns the notes of the epoch."""
    notes = bench.run(contender, bench.job(contender, "check"))
    if bench.resume(contender)["first_batch"] != notes["resume_batch"]:
        raise RuntimeError(f"{contender.name} resumes with another batch than the whole epoch has there")
    return notes


def bytes_on_disk(folder: Path) -> int:
    """Return the total size of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Read all files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def turns(bench: Bench, chosen: Sequence[Contender], rounds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Run all rounds in alternating order; returns name -> form, or ``resume`` -> notes of each round."""
    notes: dict[str, dict[str, list[dict[str, Any]]]] = {contender.name: {} for contender in chosen}
    for number in range(rounds):
        for contender in reversed(chosen) if number % 2 else chosen:
            print(f"round {number + 1} of {rounds}: {contender.name} ...", file=sys.stderr, flush=True)
            warm(bench.folder / contender.name)
            for form in contender.forms:
                epoch = bench.run(contender, bench.job(contender, "epoch", **{"as": form}))
                notes[contender.name].setdefault(form, []).append(epoch)
            notes[contender.name].setdefault("resume", []).append(bench.resume(contender))
    return notes


# ---- figures --------------------------------------------------------------------------------------------------------


def tokens_per_s(bench: Bench, form: str) -> Callable[[dict[str, Any]], float]:
    """Return the function that computes tokens per second, between the first batch and the last, from a note."""
    tokens = bench.seq_len * (1 if form == "rows" else BATCH_ROWS)
    return lambda note: float(note["batches_timed"] * tokens / note["epoch_s"])


def sizes(files: str) -> Callable[[dict[str, Any]], float]:
    """Return the function that computes the bytes of the files that a note lists."""
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
"""(name, figure, unit in which it is printed); more is better only for tokens/s."""


def values(bench: Bench, what: str, notes: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Return one figure of all rounds; empty if the contender has none."""
    if what in ("batches", "rows", "int64", "microbatches"):
        return [tokens_per_s(bench, what)(note) for note in notes.get(what, [])]
    form, _, field = what.rpartition(" ")
    rounds = notes[form or "batches"]
    if field == "shm_at_first":
        return [sizes(field)(note) for note in rounds]
    return [float(len(note[field]) if isinstance(note[field], list | dict) else note[field]) for note in rounds]


def figures_of(bench: Bench, notes: Any, disk: dict[str, int], rounds: int) -> dict[str, Any]:
    """Return the figures that are printed and recorded."""
    table: dict[str, dict[str, Any]] = {}
    for name, what, unit in ROWS:
        table[name] = {"unit": unit}
        ours = values(bench, what, notes["smalti"]) if "smalti" in notes else []
        # A single row of ours would be a view of the batch, so our batches are compared with the others' rows.
        ours = ours or (values(bench, "batches", notes["smalti"]) if "smalti" in notes else [])
        for contender, by_form in notes.items():
            measured = ours if contender == "smalti" else values(bench, what, by_form)
            if not measured:
                continue
            cell = {"median": statistics.median(measured), "all": measured}
            if contender != "smalti" and len(ours) > 1 and min(ours) > 0 and min(measured) > 0:
                slow, fast = (ours, measured) if unit == "M" else (measured, ours)
                cell["ours_better"] = ratio_of(slow, fast, names=(contender, "smalti")).figures()
            table[name][contender] = cell
    table["bytes on disk"] = {"unit": "MB", **{name: {"median": size} for name, size in disk.items()}}
    tokens = bench.rows * bench.seq_len
    return {"tokens": tokens, "seq_len": bench.seq_len, "batch_rows": BATCH_ROWS, "rounds": rounds, "table": table,
            "settings": {peer.name: peer.settings for peer in CONTENDERS if peer.name in notes}}  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    """Print the table: medians, and our advantage as a ratio, with the spread over the rounds."""
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
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--tokens", type=float, default=2e8)
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--contenders", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="folder of the tokens, which are kept; default: build/bench-stream")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/stream.json")
    options = parser.parse_args()
    unknown = set(options.contenders.split(",")) - set(names)
    if unknown:
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [contender for contender in CONTENDERS if contender.name in options.contenders.split(",")]
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
