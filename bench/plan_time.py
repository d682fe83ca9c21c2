"""Predicted and measured time of a step: six recipes on this machine.

    make bench NAME=plan_time ARGS='--record'       # about 15 minutes on two cores, idle otherwise

Measures the machine (``smalti plan hardware this-machine``) and whole steps of small recipes other than the six, to
which the factors of ``cost/step_time/factors.py`` are fitted (least squares of relative errors, none below 0). Then it
predicts the six and measures them: the median of 20 steps of the trainer's own ``train_step``, each recipe in its own
process, on random tokens. Nothing is fitted to the six. The table shows both predictions: with the fitted factors and
with those of the package.

The same step took 1.00 s and, some minutes later, 1.35 s on an otherwise idle machine with a shared host. So recipes of
similar size are kept warm together and take turns, a few steps each, and all groups run twice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from record import RecordOption, record

from smalti.base.machine import cpu_count
from smalti.config.hardware import Hardware, hardware
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import layout_of
from smalti.cost.params import count
from smalti.cost.step_time import factors, rates
from smalti.cost.step_time.step import passes_of, step_time, threads_of, units_of
from smalti.cost.step_time.work import update, works
from smalti.fleet.measure import measured_machine

GROUP, TURNS, ROUNDS, STEPS_A_ROUND, WARM_STEPS = 5, 2, 5, 2, 3
"""Recipes that are warm at a time (more do not fit 24 GB), turns of each group, and rounds of a turn."""
SETTLE_STEPS, SETTLE_S = 50, 20.0
"""Warm-up of a model with experts, in steps and seconds: the time of a step fell to half over 40 steps, when oneDNN
compiled a product for each new number of tokens of an expert, and kept 1,024. Rows are padded now, so there are few."""
WITHIN = (0.15, 0.25)
STEADY = 0.1
"""Weight of a factor's distance from 1, relative to a recipe's error: it regularises the fit."""


def _model(vocab: int, width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "family": "decoder", "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


def _moe(experts: int, chosen: int) -> dict[str, Any]:
    return {"moe": {"num_experts": experts, "num_experts_per_tok": chosen}}


def _recipe(name: str, rows: int, seq_len: int, recompute: bool, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": model,
        "data": {"sources": {"made": "made"}, "seq_len": seq_len, "stages": [{"weights": {"made": 1}}]},
        "train": {
            "duration": "1000step",
            "global_batch_tokens": rows * seq_len,
            "optimizer": {"lr": 1e-3},
            "parallel": {"device": "cpu", "activation_checkpointing": "full" if recompute else "none"},
            **train,
        },
    }


SIX = [
    _recipe("dense-1.6m", 8, 256, False, _model(4096, 128, 384, 3, 4)),
    _recipe("moe-3m", 8, 256, True, _model(4096, 128, 192, 3, 4, norm="layernorm", **_moe(8, 2))),
    _recipe("dense-23m", 4, 512, True, _model(16384, 384, 1024, 6, 6)),
    _recipe("moe-38m", 4, 512, False, _model(16384, 384, 512, 6, 6, **_moe(8, 2))),
    _recipe("dense-67m", 1, 1024, False, _model(16000, 768, 2048, 6, 12)),
    _recipe("moe-83m", 1, 1024, True, _model(16000, 640, 768, 5, 10, **_moe(8, 2))),
]
"""Dense and with experts, three sizes, with and without recomputation."""

OUTSIDE = [
    _recipe("dense-w64", 16, 128, False, _model(2048, 64, 256, 4, 2)),
    _recipe("dense-w192", 8, 256, True, _model(8192, 192, 512, 4, 6, norm="layernorm", gated=False, activation="gelu")),
    _recipe("dense-w256", 4, 1024, False, _model(8192, 256, 704, 5, 4)),
    _recipe("dense-w512", 4, 512, False, _model(12000, 512, 1408, 4, 8), microbatch_tokens=1024),
    _recipe("dense-w1024", 2, 512, True, _model(16384, 1024, 2816, 4, 8)),
    _recipe("moe-w96", 8, 256, False, _model(4096, 96, 128, 3, 3, **_moe(4, 2))),
    _recipe("moe-w256", 8, 256, True, _model(8192, 256, 352, 4, 4, **_moe(16, 4))),
    _recipe("moe-w512", 4, 512, False, _model(12000, 512, 704, 4, 8, **_moe(8, 2))),
]
"""Recipes to which the factors are fitted."""


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/plan_time.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action=RecordOption, help="write bench/results/plan_time.json")
    parser.add_argument("--machine", help="a file of 'smalti plan hardware this-machine --save', instead of measuring")
    parser.add_argument("--threads", type=int, help="CPU threads; absent: all cores, which must be idle otherwise")
    parser.add_argument("--save", help="write the measured machine to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        take_turns(json.loads(options.child))
        return
    began_s = time.monotonic()
    threads = options.threads or cpu_count()
    machine = (
        hardware(options.machine)
        if options.machine
        else measured_machine(threads=threads, formats=("bf16",), report=print)
    )
    for recipe in (*OUTSIDE, *SIX):
        recipe["train"]["parallel"]["threads"] = threads
    if options.save:
        Path(options.save).write_text(yaml.safe_dump(machine.model_dump(mode="json"), default_flow_style=None))
    measured = in_turns([*OUTSIDE, *SIX])
    outside = [row(recipe, machine, measured[recipe["name"]]) for recipe in OUTSIDE]
    fitted = fit(outside)
    print("fitted:", ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    six = [row(recipe, machine, measured[recipe["name"]]) for recipe in SIX]
    report(outside, fitted, "recipes to which the factors are fitted")
    counts = report(six, fitted, "the six")
    print(f"{time.monotonic() - began_s:.0f} s")
    if options.record:
        figures = {"six": six, "outside": outside, "fitted": fitted, "package": dict(factors.CPU), "counts": counts}
        print("wrote", record("plan_time", figures))


def row(recipe: dict[str, Any], machine: Hardware, measured: list[float]) -> dict[str, Any]:
    """Return sums by class of work, without factors; the package's prediction; and the measurement."""
    config = from_dict(RunConfig, recipe).config.on("cpu")
    shares, compute = passes_of(config, layout_of(config)), config.train.precision.compute
    passes = sum(share.passes for share in shares)
    assert machine.measured is not None
    sums = dict.fromkeys(factors.CPU, 0.0)
    done = [work for share in shares for work in works(config, share)]
    for work in [*done, *update(config, layout_of(config), passes)]:
        alone_s = rates.measured_s(work, machine.measured, compute, threads=threads_of(config, machine))
        sums[factors.class_of(work)] += alone_s * work.count
    sums["unit_s"] = units_of(config) * passes
    return {
        "name": recipe["name"],
        "measured_s": statistics.median(measured),
        "package_s": step_time(config, machine).total_s,
        "sums": sums,
        "steps_s": measured,
    }


def predicted(row: dict[str, Any], by_class: dict[str, float]) -> float:
    """Return the seconds of a step with these factors."""
    return float(sum(by_class[name] * value for name, value in row["sums"].items()))


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the factors by least squares of relative errors; those that would be negative are 0."""
    names = list(factors.CPU)
    scale = np.array([1.0] * (len(names) - 1) + [1e-4])  # the last is in host seconds per unit, the others are near 1
    sides = np.array([[each["sums"][name] / each["measured_s"] for name in names] for each in rows]) * scale
    prior = np.eye(len(names)) * STEADY
    prior_right = np.array([STEADY] * (len(names) - 1) + [0.0])
    left = np.vstack([sides, prior])
    right = np.concatenate([np.ones(len(rows)), prior_right])
    used = list(range(len(names)))
    while True:
        solution, *_ = np.linalg.lstsq(left[:, used], right, rcond=None)
        if (solution >= 0).all():
            break
        used.remove(used[int(solution.argmin())])
    fitted = dict.fromkeys(names, 0.0)
    for index, value in zip(used, solution, strict=True):
        fitted[names[index]] = float(value * scale[index])
    return fitted


def report(rows: list[dict[str, Any]], fitted: dict[str, float], title: str) -> dict[str, Any]:
    """Print a table; return how many are within the limits."""
    print(
        f"\n{title}\n\n{'recipe':12} {'measured':>10} {'fitted':>10} {'ratio':>6} {'package':>10} {'ratio':>6}   shares"
    )
    ratios: dict[str, list[float]] = {"fitted": [], "package": []}
    for row in rows:
        both = {"fitted": predicted(row, fitted), "package": row["package_s"]}
        for name, value in both.items():
            ratios[name].append(value / row["measured_s"])
        shares = " ".join(f"{name} {value * fitted[name] / both['fitted']:.0%}" for name, value in row["sums"].items())
        columns = [
            f"{value * 1e3:7.1f} ms {value / row['measured_s']:6.2f}" for value in (both["fitted"], both["package"])
        ]
        print(f"{row['name']:12} {row['measured_s'] * 1e3:7.1f} ms {' '.join(columns)}   {shares}")
    counts = {
        name: {str(limit): sum(abs(ratio - 1) <= limit for ratio in values) for limit in WITHIN}
        for name, values in ratios.items()
    }
    for name, within in counts.items():
        text = ", ".join(f"{number} of {len(rows)} within {float(limit):.0%}" for limit, number in within.items())
        print(f"{name}: {text}")
    return counts


def in_turns(recipes: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of each step by recipe, measured in groups of similar size, twice."""
    recipes = sorted(recipes, key=lambda recipe: count(from_dict(RunConfig, recipe).config.model).total)
    groups = [recipes[start : start + GROUP] for start in range(0, len(recipes), GROUP)]
    times: dict[str, list[float]] = {recipe["name"]: [] for recipe in recipes}
    for group in groups * TURNS:
        for name, steps_s in _of_group(group).items():
            times[name] += steps_s
    return times


def _of_group(recipes: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Warm up every recipe in its own process; in every round each runs a few steps."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    children: dict[str, subprocess.Popen[str]] = {}
    times: dict[str, list[float]] = {recipe["name"]: [] for recipe in recipes}
    with ExitStack() as stack:
        for recipe in recipes:
            words = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(recipe)]
            child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(child.kill)
            children[recipe["name"]] = child
            print(f"{recipe['name']} is warm after {_answer(child)} steps", flush=True)
        for _ in range(ROUNDS):
            for name, child in children.items():
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
                times[name] += _answer(child)
    return times


def _answer(child: "subprocess.Popen[str]") -> Any:
    """Return the next line of JSON that a child prints."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise RuntimeError(f"a recipe's process ended with exit code {child.wait()}; its error is above")


def take_turns(recipe: dict[str, Any]) -> None:
    """In the child: warm up a job on random tokens, then time a few steps for each line of stdin."""
    import torch

    from smalti.train.batches import Microbatch
    from smalti.train.job import build

    config = from_dict(RunConfig, recipe).config
    share, *rest = passes_of(config, layout_of(config))
    assert not rest, "a batch of whole microbatches"
    shape = (share.tokens // share.seq_len, share.seq_len)

    class Random:
        """Random microbatches of a step."""

        def batch(self, step: int) -> list[Microbatch]:
            microbatches = []
            for _ in range(int(share.passes)):
                tokens = torch.randint(config.model.vocab_size, (shape[0], shape[1] + 1))
                positions = torch.arange(shape[1]).expand(shape).contiguous()
                microbatches.append(
                    Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
                )
            return microbatches

        def state(self, step: int) -> dict[str, Any]:
            return {}

        def check(self, state: dict[str, Any], step: int) -> None:
            return None

    with tempfile.TemporaryDirectory(prefix="plan-time-") as folder:
        batches = Random()
        job = build(config.model_copy(update={"folder": f"{folder}/run"}), batches=batches)
        times = list[float]()
        warm = WARM_STEPS if config.model.moe is None else SETTLE_STEPS
        while len(times) < WARM_STEPS or (len(times) < warm and sum(times) < SETTLE_S):
            times.append(_timed(job, batches))
        print("answer", len(times), flush=True)
        for _ in sys.stdin:
            _timed(job, batches)  # the caches are another recipe's
            print("answer", [_timed(job, batches) for _ in range(STEPS_A_ROUND)], flush=True)


def _timed(job: Any, batches: Any) -> float:
    from smalti.train.step import train_step

    microbatches = batches.batch(job.state.step)
    start = time.perf_counter()
    result = train_step(job.state, microbatches, job.loss)
    float(result.loss)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
