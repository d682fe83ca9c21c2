"""Whether the experts of the recipe demo-moe stay in balance, whatever the seed.

    make bench NAME=router_balance                                            20 seeds of 300 steps; about an hour
    make bench NAME=router_balance ARGS='--seeds 3 --steps 2000'
    make bench NAME=router_balance ARGS='--seeds 3 --also model.moe.balance_loss_coef=0.01'

Each run is ``smalti train demo-moe`` on one rank and one core, over the documents of the installed Python, prepared as
in ``smalti demo``. The figure of a run is its worst median of ``moe/load_imbalance`` (the busiest expert of the worst
layer over the mean) over any 20 steps from step 100 on. The same command on the same code resumes a stopped bench.
"""

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_runs import bits_per_byte, prepared, train
from record import ROOT, RecordOption, record

STEPS = 300
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


def figures_of(seed: int, rows: list[dict[str, Any]]) -> Balance:
    """Return the figures of a run from its metrics."""
    imbalance = {row["step"]: row["moe/load_imbalance"] for row in rows if "moe/load_imbalance" in row}
    dead = [row["moe/dead_experts_frac"] for row in rows if row["step"] >= FROM_STEP and "moe/dead_experts_frac" in row]
    ordered = sorted(imbalance)
    medians = {
        first: statistics.median(imbalance[step] for step in ordered[index : index + WINDOW])
        for index, first in enumerate(ordered[: len(ordered) - WINDOW + 1])
    }
    return Balance(
        seed=seed,
        worst_median=max(median for first, median in medians.items() if first >= FROM_STEP),
        first_median=medians[ordered[0]],
        last_median=list(medians.values())[-1],
        worst_dead_frac=max(dead),
        bits_per_byte=bits_per_byte(rows),
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
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--also", nargs="*", default=[], metavar="a.b=value", help="overrides of the recipe")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a core each")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-router-balance"), help="keeps data and runs")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/router_balance*.json")
    options = parser.parse_args()
    if options.steps < FROM_STEP + WINDOW:
        parser.error(f"--steps {options.steps}: at least {FROM_STEP + WINDOW}")
    if options.record and options.steps == STEPS and options.seeds < 20:
        parser.error(f"--record --seeds {options.seeds}: at least 20, for the result of {STEPS} steps has so many")
    if options.record and options.also:
        parser.error("--record is for the recipe as it is, without --also")
    folder = prepared(Path(options.folder))
    rows: list[Balance] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        settings = (options.steps, options.also)
        futures = [pool.submit(train, folder, "demo-moe", seed, *settings) for seed in range(options.seeds)]
        for seed, future in enumerate(futures):
            rows.append(figures_of(seed, future.result()))
            text = f"worst {rows[-1].worst_median:.2f} ({seed + 1} of {len(futures)} runs)"
            print(f"seed {seed}: {text}", file=sys.stderr, flush=True)
    show(rows, options.steps)
    if options.record:
        figures = {f"{options.seeds} seeds of {options.steps} steps": [asdict(row) for row in rows]}
        name = "router_balance" if options.steps == STEPS else f"router_balance-{options.steps}"
        print("wrote", record(name, figures))


if __name__ == "__main__":
    main()
