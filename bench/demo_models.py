"""Which model the demo should train: a dense model and MoEs after equal training time on its data.

    make bench NAME=demo_models ARGS='--record'                # three seeds of each; about an hour
    make bench NAME=demo_models ARGS='--seeds 2 --only dense "2 of 8"'

The time of a step is the processor time of one thread, in turns in one process; every model trains for as many steps as
fit into the time of the dense one's ``--steps``. One run of each learning rate chooses the rate that all seeds take.
Finished runs are not repeated on the same code.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import torch
from demo_runs import bits_per_byte, prepared, train
from moe_twin import WARM_STEPS, job_of, stepper
from record import ROOT, RecordOption, record

from smalti.config.load import load
from smalti.config.run import RunConfig

_DENSE = "demo-dense"
_MOE = "demo-moe"
MODELS: dict[str, tuple[str, ...]] = {
    "dense": (_DENSE,),
    "dense, 2 layers": (_DENSE, "model.num_hidden_layers=2", "model.intermediate_size=512"),
    "dense, width 192": (_DENSE, "model.hidden_size=192", "model.intermediate_size=576", "model.num_attention_heads=6"),
    "2 of 8": (_MOE,),
    "4 of 16": (_MOE, "model.moe.num_experts=16", "model.moe.num_experts_per_tok=4", "model.intermediate_size=96"),
    "1 of 8 + 1 shared": (
        _MOE, "model.family=decoder", "model.moe.num_experts_per_tok=1", "model.moe.norm_topk_prob=false",
        "model.moe.num_shared_experts=1",
    ),
}  # fmt: skip
"""Name -> recipe and overrides."""
RATES = ("2e-3", "4e-3")
SHARES = {"code": 0.6, "prose": 0.4}
"""Weights of the sources where one figure decides: those of most of the demo's training."""
TURNS = 15


def step_ms(names: Iterable[str]) -> dict[str, float]:
    """Return the median processor time of a training step of each model, in milliseconds, on random tokens."""
    settings = (
        "data.tokenizer=null", "train.optimizer.lr=1e-4", "train.schedule.warmup=0step", "train.schedule.decay=0step",
        "train.parallel.device=cpu", "train.parallel.ranks=1", "train.parallel.threads=1",
    )  # fmt: skip
    spent_ms: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        configs = {name: load(RunConfig, MODELS[name][0], [*MODELS[name][1:], *settings]).config for name in spent_ms}
        steps = {name: stepper(stack.enter_context(job_of(config))) for name, config in configs.items()}
        for turn in range(-WARM_STEPS, TURNS):
            for name, step in steps.items():
                begin_s = time.process_time()
                step()
                if turn >= 0:
                    spent_ms[name].append(1e3 * (time.process_time() - begin_s))
    return {name: statistics.median(values) for name, values in spent_ms.items()}


def score(figures: dict[str, float]) -> float:
    """Return the weighted mean of the bits per byte of the sources."""
    return sum(share * figures[source] for source, share in SHARES.items())


class Runs:
    """The runs of the models, ``jobs`` at a time."""

    def __init__(self, folder: Path, steps: dict[str, int], jobs: int) -> None:
        self._folder, self._steps, self._jobs = folder, steps, jobs

    def measure(self, keys: Iterable[tuple[str, str, int]]) -> dict[tuple[str, str, int], dict[str, float]]:
        """Return the held-out bits per byte of each (model, learning rate, seed)."""
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = {key: pool.submit(self._one, *key) for key in keys}
            return {key: future.result() for key, future in futures.items()}

    def _one(self, name: str, rate: str, seed: int) -> dict[str, float]:
        recipe, *overrides = MODELS[name]
        overrides += [f"train.optimizer.lr={rate}", "train.eval_tokens=65536"]
        figures = bits_per_byte(train(self._folder, recipe, seed, self._steps[name], overrides))
        print(f"{name}, lr {rate}, seed {seed}: {figures}", file=sys.stderr, flush=True)
        return figures


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/demo_models.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, 2 ...; seed 0 chooses the learning rate")
    parser.add_argument("--steps", type=int, default=1200, help="of the dense model")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a core each")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-demo-models"), help="keeps data and runs")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/demo_models.json")
    options = parser.parse_args()
    names = list(dict.fromkeys(["dense", *options.only]))
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder = prepared(Path(options.folder))
    times_ms = step_times(folder, names)
    steps = {name: round(options.steps * times_ms["dense"] / times_ms[name]) for name in names}
    runs = Runs(folder, steps, options.jobs)
    results = runs.measure([(name, rate, 0) for name in names for rate in RATES])
    best = {name: min(RATES, key=lambda rate: score(results[name, rate, 0])) for name in names}
    results |= runs.measure([(name, best[name], seed) for name in names for seed in range(1, options.seeds)])
    figures = {}
    print("| model | ms a step | steps | lr | " + " | ".join(SHARES) + " | each seed: mean over sources |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        rows = [results[name, best[name], seed] for seed in range(options.seeds)]
        means = {source: statistics.mean(row[source] for row in rows) for source in SHARES}
        shown = " | ".join(f"{mean:.3f}" for mean in means.values())
        seeds = ", ".join(f"{score(row):.3f}" for row in rows)
        print(f"| {name} | {times_ms[name]:.0f} | {steps[name]} | {best[name]} | {shown} | {seeds} |")
        figures[name] = {
            "step_ms": times_ms[name], "steps": steps[name], "lr": best[name], "bits_per_byte": means, "seeds": rows,
            "rates": {rate: results[name, rate, 0] for rate in RATES},
        }  # fmt: skip
    if options.record:
        print("wrote", record("demo_models", figures))


def step_times(folder: Path, names: list[str]) -> dict[str, float]:
    """Return ``step_ms``, measured once: the number of steps of a resumed bench stays the same."""
    path = folder / f"times-{sha256(repr(names).encode()).hexdigest()[:8]}.json"
    if not path.exists():
        path.write_text(json.dumps(step_ms(names)))
    times_ms: dict[str, float] = json.loads(path.read_text())
    return times_ms


if __name__ == "__main__":
    main()
