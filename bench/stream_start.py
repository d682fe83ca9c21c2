"""Times the first microbatch of a rank, two thirds through 12 trillion tokens, and the start of mosaicml-streaming.

    make bench NAME=stream_start                            about 5 minutes on two cores; 12 GB of memory at the end
    make bench NAME=stream_start ARGS='--rounds 3 --largest 4e6'

Ours: five sources in two stages, 44,700 sparse files with the sizes, manifests and digests of a real data set; only the
blocks that the step reads are real (and checked). A process starts, imports, builds the stream of one rank of 128 and
computes its microbatch with targets, positions and documents. Time and memory are counted above Python with numpy.
mosaicml-streaming: the same until a rank knows its samples, without reading any (its shards do not exist), measured at
sizes that fit into memory and extrapolated linearly to 12 trillion tokens.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peers import python_of
from record import RecordOption, record
from stream import compiled, run_child

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from sparse_tokens import fill, sparse_tokens  # noqa: E402

SEQ_LEN, GLOBAL_ROWS, WORLD_SIZE = 4096, 1024, 128
SHARES = {"web": 0.5, "code": 0.2, "papers": 0.15, "books": 0.1, "math": 0.05}
STAGES = [
    {"until": "0.6run", "weights": SHARES},
    {"weights": {"web": 0.3, "code": 0.3, "papers": 0.2, "books": 0.1, "math": 0.1}},
]
MOSAIC_BYTES_PER_SAMPLE = 40
"""Approximate peak memory, which decides the largest size."""


def job_of(folder: Path, n_tokens: int) -> dict[str, Any]:
    """Return the job description for our child process."""
    batch = GLOBAL_ROWS * SEQ_LEN
    steps = n_tokens // batch
    return {
        "do": "first",
        "data": {"sources": {name: str(folder / name) for name in SHARES}, "seq_len": SEQ_LEN, "stages": STAGES},
        "seed": 17,
        "total_steps": steps,
        "global_batch_tokens": batch,
        "microbatch_tokens": batch // WORLD_SIZE,
        "rank": 77,
        "world_size": WORLD_SIZE,
        "step": 2 * steps // 3,
    }


def prepare(folder: Path, n_tokens: int) -> dict[str, Any]:
    """Write sparse files for all sources, with valid blocks for two steps; returns the child's job."""
    from smalti.config.data import DataConfig
    from smalti.config.durations import RunLength
    from smalti.data.stream.stream import Stream

    job = job_of(folder, n_tokens)
    manifests = {name: sparse_tokens(folder / name, int(share * n_tokens)) for name, share in SHARES.items()}
    length = RunLength(job["total_steps"], ((0, job["global_batch_tokens"]),))
    data = DataConfig.model_validate(job["data"])
    stream = Stream(data, seed=job["seed"], length=length, microbatch_tokens=job["microbatch_tokens"])
    first = stream.schedule.first_position(job["step"])
    source, _, index = stream.order.locate(np.arange(first, first + 2 * GLOBAL_ROWS))
    for number, name in enumerate(stream.sources):
        fill(folder / name, manifests[name], index[source == number] * SEQ_LEN, SEQ_LEN + 1)
    stream.close()
    return job


def ours(folder: Path, n_tokens: int, rounds: int) -> dict[str, Any]:
    """Return medians of our start over ``rounds`` processes, after one that does not count."""
    compiled()
    job = prepare(folder, n_tokens)
    script = ROOT / "bench" / "peers" / "stream_start_smalti.py"
    notes = [run_child(sys.executable, script, job, folder) for _ in range(rounds + 1)][1:]
    figures: dict[str, Any] = {
        name: statistics.median(note[name] for note in notes)
        for name in ("imports_s", "stream_imports_s", "first_after_imports_s", "first_s", "second_step_s",
                     "resident_bytes", "private_bytes", "peak_bytes", "bare_bytes", "files_left")
    }  # fmt: skip
    figures["first_s_all"] = [note["first_s"] for note in notes]
    figures["files_at_first"] = sorted({path for note in notes for path in note["files_at_first"]})
    figures["shm"] = sorted({path for note in notes for path in (*note["shm_at_first"], *note["shm_left"])})
    figures["manifest_bytes"] = sum((folder / name / "manifest.json").stat().st_size for name in SHARES)
    figures["files"] = sum(len(list((folder / name).glob("*.tok"))) for name in SHARES)
    return figures


def mosaic(folder: Path, rows: int) -> dict[str, Any]:
    """Measure its start with an index of ``rows`` samples, once."""
    script = ROOT / "bench" / "peers" / "stream_start_mosaic.py"
    python = str(python_of("stream-mosaic"))
    job = {
        "do": "make",
        "folder": str(folder / f"mds-{rows}"),
        "rows": rows,
        "rows_per_rank": GLOBAL_ROWS // WORLD_SIZE,
    }
    run_child(python, script, job, folder)
    note = run_child(python, script, {**job, "do": "first"}, folder)
    names = ("first_after_imports_s", "build_s", "stream_imports_s", "peak_bytes", "shm_peak_bytes", "shm_left")
    return {
        **{name: note[name] for name in names},
        "constructor_s": note["build_s"] - note["stream_imports_s"],
        "files_at_first": len(note["files_at_first"]),
        "rows": rows,
        "index_bytes": (folder / f"mds-{rows}" / "index.json").stat().st_size,
    }


def sizes(largest: float) -> list[int]:
    """Return the numbers of samples to measure, each four times the one before, up to ``largest`` and the memory."""
    words = next(line.split() for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    fits = 0.75 * int(words[1]) * 1024 / MOSAIC_BYTES_PER_SAMPLE
    return [1 << power for power in (18, 20, 22, 24, 26, 28) if 1 << power <= min(fits, largest)] or [1 << 18]


def extended(measured: list[dict[str, Any]], rows: int) -> dict[str, float]:
    """Extrapolate linearly from the two largest sizes to ``rows`` samples."""
    if len(measured) < 2:
        return {}
    small, large = measured[-2:]
    factor = (rows - large["rows"]) / (large["rows"] - small["rows"])
    wanted = ("first_after_imports_s", "peak_bytes", "shm_peak_bytes", "index_bytes")
    return {name: large[name] + factor * (large[name] - small[name]) for name in wanted}


def show(figures: dict[str, Any]) -> None:
    """Print our figures, then those of the peer at each size and extrapolated."""
    start = figures["smalti"]
    print(
        f"\n{figures['tokens']:,} tokens, {start['files']:,} files, manifests of {start['manifest_bytes'] / 1e6:.1f} "
        f"MB; first microbatch of one rank of {WORLD_SIZE}, two thirds through:\n"
        f"  {start['first_s'] * 1e3:7.1f} ms above Python with numpy, with the imports of the stream "
        f"({min(start['first_s_all']) * 1e3:.1f} to {max(start['first_s_all']) * 1e3:.1f})\n"
        f"  {start['stream_imports_s'] * 1e3:7.1f} ms of them are imports; {start['first_after_imports_s'] * 1e3:.1f} "
        f"ms are manifests, schedule, order, reading and checking\n"
        f"  {start['peak_bytes'] / 1e6:7.1f} MB above Python with numpy at the peak, "
        f"{start['resident_bytes'] / 1e6:.1f} MB after it\n"
        f"  files written: {len(start['files_at_first'])}; in /dev/shm: {len(start['shm'])}; "
        f"the next step: {start['second_step_s'] * 1e3:.2f} ms"
    )
    rows = [(f"{size['rows']:,}", size) for size in figures.get("mosaic", [])]
    if "mosaic_extended" in figures:
        rows.append((f"{figures['rows']:,} EXTRAPOLATED", figures["mosaic_extended"]))
    if rows:
        print("\nmosaicml-streaming 0.13.0: until a rank knows its samples, without imports and without reading any")
        print(f"{'samples':>25}{'s':>10}{'peak MB':>12}{'/dev/shm MB':>14}{'index MB':>11}")
    for name, size in rows:
        print(
            f"{name:>25}{size['first_after_imports_s']:10.2f}{size['peak_bytes'] / 1e6:12,.0f}"
            f"{size['shm_peak_bytes'] / 1e6:14,.0f}{size['index_bytes'] / 1e6:11,.1f}"
        )


def main() -> None:
    """Print both; ``--record`` also writes bench/results/stream_start.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=12e12)
    parser.add_argument("--rounds", type=int, default=15, help="processes of ours")
    parser.add_argument(
        "--largest", type=float, default=3e8, help="maximum number of samples of the peer; 0: without the peer"
    )
    parser.add_argument("--folder", help="folder for the sparse files; default: a temporary one")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/stream_start.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="stream-start-") as place:
        figures: dict[str, Any] = {"tokens": int(options.tokens), "rows": int(options.tokens) // SEQ_LEN}
        figures["smalti"] = ours(Path(place), int(options.tokens), options.rounds)
        if options.largest:
            figures["mosaic"] = []
            for rows in sizes(options.largest):
                print(f"mosaicml-streaming: {rows:,} samples ...", file=sys.stderr, flush=True)
                figures["mosaic"].append(mosaic(Path(place), rows))
            figures["mosaic_extended"] = extended(figures["mosaic"], figures["rows"])
    show(figures)
    if options.record:
        print("wrote", record("stream_start", figures))


if __name__ == "__main__":
    main()
