"""Whether the experts of the demo stay in balance, whatever the seed.

    make bench NAME=router_balance                                            20 seeds of 300 steps; about an hour
    make bench NAME=router_balance ARGS='--seeds 3 --steps 2000'
    make bench NAME=router_balance ARGS='--seeds 3 --also model.moe.balance_loss_coef=0.01'

Each run is ``smalti train demo`` on one rank and one core, over the documents of the installed Python, prepared as in
``smalti demo``. The figure of a run is its worst median of ``moe/load_imbalance`` (the busiest expert of the worst
layer over the mean) over any 20 steps from step 100 on. The same command on the same code resumes a stopped bench.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from record import RecordOption, commit_of, record

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("code", "prose")
FROM_STEP, WINDOW = 100, 20


@dataclass(frozen=True)
class Balance:
    """Figures of one run."""

    seed: int
    worst_median: float
    """Highest median of ``moe/load_imbalance`` over ``WINDOW`` steps from ``FROM_STEP`` on."""
    first_median: float
    """Median over the first ``WINDOW`` steps."""
    last_median: float
    worst_dead_frac: float
    """Highest ``moe/dead_experts_frac`` of a step from ``FROM_STEP`` on."""
    bits_per_byte: dict[str, float]
    """Held-out bits per byte at the end, by source."""


def prepare(folder: Path) -> None:
    """Write the token files of the demo below ``folder``, by its commands."""
    finished = folder / "data/finished"
    if finished.exists():
        return
    shutil.rmtree(folder / "data", ignore_errors=True)
    smalti(folder, "data", "documents", "data/demo/raw")
    for stage, recipe in (("curate", "demo-curate"), ("dedup", "demo-dedup"), ("tokenize", "demo-tokenize")):
        smalti(folder, "data", stage, recipe)
    finished.touch()


def code_key() -> str:
    """Return a digest of the commit and of what was changed since."""
    changes = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=False).stdout
    return sha256(commit_of(ROOT).encode() + changes).hexdigest()[:12]


def smalti(folder: Path, *arguments: str) -> None:
    """Run a command. Raises RuntimeError with the end of its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "smalti", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def run(folder: Path, runs: str, seed: int, steps: int, also: list[str]) -> Balance:
    """Train one seed, unless it is finished, and read its metrics."""
    name = f"runs/{runs}/{seed}"
    status = folder / name / "status.json"
    if not status.exists() or json.loads(status.read_text())["state"] != "done":
        smalti(
            folder, "train", "demo", f"name={seed}", f"folder={name}", f"seed={seed}", f"train.duration={steps}step",
            "train.parallel.ranks=1", "train.parallel.threads=1", "train.parallel.device=cpu", "train.log_every=1step",
            "train.eval_every=1run", *also,
        )  # fmt: skip
    return read(folder / name, seed)


def read(folder: Path, seed: int) -> Balance:
    """Read the metrics of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    imbalance = {row["step"]: row["moe/load_imbalance"] for row in rows if "moe/load_imbalance" in row}
    dead = [row["moe/dead_experts_frac"] for row in rows if row["step"] >= FROM_STEP and "moe/dead_experts_frac" in row]
    steps = sorted(imbalance)
    medians = {
        first: statistics.median(imbalance[step] for step in steps[index : index + WINDOW])
        for index, first in enumerate(steps[: len(steps) - WINDOW + 1])
    }
    keys = {source: f"metrics/eval/{source}/bits_per_byte" for source in SOURCES}
    last = next(row for row in reversed(rows) if keys["code"] in row)
    return Balance(
        seed=seed,
        worst_median=max(median for first, median in medians.items() if first >= FROM_STEP),
        first_median=medians[steps[0]],
        last_median=list(medians.values())[-1],
        worst_dead_frac=max(dead),
        bits_per_byte={source: last[key] for source, key in keys.items()},
    )


def show(rows: list[Balance], steps: int) -> None:
    """Print the table of the page."""
    print(f"\n| seed | first {WINDOW} | worst from {FROM_STEP} on | last {WINDOW} | dead | code | prose |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        bits = " | ".join(f"{value:.3f}" for value in row.bits_per_byte.values())
        medians = f"{row.first_median:.2f} | {row.worst_median:.2f} | {row.last_median:.2f}"
        print(f"| {row.seed} | {medians} | {row.worst_dead_frac:.3f} | {bits} |")
    worst = [row.worst_median for row in rows]
    print(
        f"\n{steps} steps: worst {max(worst):.2f}, median {statistics.median(worst):.2f}; "
        f"{sum(value < 1.5 for value in worst)} of {len(worst)} below 1.5"
    )


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/router_balance.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many: 0, 1, 2 ...")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--also", nargs="*", default=[], metavar="a.b=value", help="overrides of the recipe")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a core each")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-router-balance"), help="keeps data and runs")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/router_balance.json")
    options = parser.parse_args()
    if options.steps < FROM_STEP + WINDOW:
        parser.error(f"--steps {options.steps}: at least {FROM_STEP + WINDOW}")
    if options.record and options.also:
        parser.error("--record is for the recipe as it is, without --also")
    folder = Path(options.folder) / code_key()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    runs = f"{options.steps}-{sha256(str(sorted(options.also)).encode()).hexdigest()[:8]}"
    rows: list[Balance] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run, folder, runs, seed, options.steps, options.also) for seed in range(options.seeds)]
        for number, future in enumerate(futures, 1):
            rows.append(future.result())
            text = f"worst {rows[-1].worst_median:.2f} ({number} of {len(futures)} runs)"
            print(f"seed {rows[-1].seed}: {text}", file=sys.stderr, flush=True)
    show(rows, options.steps)
    if options.record:
        figures = {f"{options.seeds} seeds of {options.steps} steps": [asdict(row) for row in rows]}
        print("wrote", record("router_balance", figures))


if __name__ == "__main__":
    main()
