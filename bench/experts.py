"""A dense model and MoEs at equal training FLOPs: 1 of 8, 2 of 8 and 4 of 16 experts.

    make bench NAME=experts ARGS='--record --picture'   three seeds, about 20 minutes on two cores
    make bench NAME=experts ARGS=--quick                a test in under a minute; its figures mean nothing

The documents of the installed Python are curated, deduplicated and tokenised as in ``smalti demo``; each run is one of
``smalti train`` (``train.job.run``), two at a time, a core each. All runs have the same width, depth, batch and
schedule, and for each seed less than one epoch of the same data. Active parameters are equal: an expert is as wide as
the dense MLP divided by the number of active experts. The FLOPs of the router (``smalti/cost/flops.py``) are
compensated by fewer steps, so that all runs have the same FLOPs to within a step. With one active expert, its weight
is the router's probability (Switch, arXiv:2101.03961), because a single normalised weight is 1 and gives the router no
gradient; otherwise the weights are normalised as in DBRX.

The result is held-out bits per byte, over windows that are the same in every run, weighted as the training data.
Intervals are Student's t over the seeds, 95 %; differences are between runs with the same seed. Finished runs are kept
in build/bench-experts and not repeated on the same commit.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from record import RecordOption, commit_of, record

from smalti.base.chart import Series, line_chart, standalone
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "concepts" / "pictures"
ARMS: dict[str, tuple[int, int] | None] = {"dense": None, "1 of 8": (8, 1), "2 of 8": (8, 2), "4 of 16": (16, 4)}
"""Name -> (experts, experts that a token is sent to)."""
SHARES = {"code": 0.75, "prose": 0.25}
EVALUATIONS = 8
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5 % quantile of Student's t by degrees of freedom."""


@dataclass(frozen=True)
class Size:
    """Settings that all runs share."""

    hidden: int = 128
    layers: int = 4
    intermediate: int = 512
    vocab: int = 2048
    seq_len: int = 256
    batch_tokens: int = 4096
    steps: int = 240
    """Steps of the dense model."""
    lr: float = 4e-3
    eval_tokens: int = 32_768
    thin: int = 1
    """Only every n-th document of the corpus is used."""


QUICK = Size(hidden=32, layers=2, intermediate=128, vocab=512, seq_len=64, batch_tokens=1024, steps=24, thin=12,
             eval_tokens=4096)  # fmt: skip


def prepare(folder: Path, size: Size) -> None:
    """Write token files of code and prose by the commands of the demo."""
    raw = folder / "data/demo/raw"
    if (folder / "data/demo/tokens/prose/train/manifest.json").exists():
        return
    smalti(folder, "data", "documents", str(raw))
    for path in raw.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:: size.thin]))
    smalti(folder, "data", "curate", "demo-curate")
    smalti(folder, "data", "dedup", "demo-dedup")
    smalti(folder, "data", "tokenize", "demo-tokenize", f"vocab_size={size.vocab}")


def smalti(folder: Path, *arguments: str) -> None:
    """Run a command. Raises RuntimeError with the end of its stderr if it fails."""
    print("smalti", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "smalti", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"smalti {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def config_of(folder: Path, size: Size, arm: str, seed: int) -> RunConfig:
    """Return the config of a run with as many steps as the dense model's FLOPs allow."""
    dense = _config(folder, size, "dense", seed, size.steps)
    config = _config(folder, size, arm, seed, size.steps)
    flops, whole = (train_flops_per_token(run.model, size.seq_len) for run in (config, dense))
    return _config(folder, size, arm, seed, size.steps * whole // flops)


def _config(folder: Path, size: Size, arm: str, seed: int, steps: int) -> RunConfig:
    experts = ARMS[arm]
    model: dict[str, Any] = {
        "family": "decoder",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate // (experts[1] if experts else 1),
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 32,
        "max_position_embeddings": size.seq_len,
    }
    if experts:
        model["moe"] = {
            "num_experts": experts[0],
            "num_experts_per_tok": experts[1],
            "norm_topk_prob": experts[1] > 1,
        }
    tokens = folder / "data/demo/tokens"
    values = {
        "name": f"{arm.replace(' ', '-')}-{seed}",
        "folder": str(folder / "runs" / f"{arm.replace(' ', '-')}-{seed}"),
        "seed": seed,
        "model": model,
        "data": {
            "tokenizer": str(tokens / "tokenizer"),
            "sources": {name: str(tokens / name / "train") for name in SHARES},
            "heldout": {name: str(tokens / name / "heldout") for name in SHARES},
            "seq_len": size.seq_len,
            "stages": [{"weights": SHARES}],
        },
        "train": {
            "duration": f"{steps}step",
            "global_batch_tokens": size.batch_tokens,
            "optimizer": {"lr": size.lr},
            "schedule": {"warmup": "0.1run", "decay": "0.4run"},
            "parallel": {"device": "cpu", "threads": 1},
            "checkpoint": {"every": "1run", "keep": 1},
            "eval_every": f"{max(1, steps // EVALUATIONS)}step",
            "eval_tokens": size.eval_tokens,
        },
        "track": {"console": False},
    }
    return from_dict(RunConfig, values, "experts").config


def train(config: RunConfig) -> float:
    """Run a training in this process; return its seconds."""
    from smalti.evals.in_loop import heldout_hook
    from smalti.train import job

    logging.getLogger("smalti").setLevel(logging.WARNING)
    begin_s = time.perf_counter()
    job.run(config, {}, evaluation=heldout_hook)
    return time.perf_counter() - begin_s


def read(config: RunConfig) -> dict[str, Any]:
    """Read cross-entropy of each step, without the balance loss, and held-out bits per byte by training FLOPs."""
    rows = [json.loads(line) for line in (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines()]
    nats = "loss/train/cross_entropy"
    keys = {name: f"metrics/eval/{name}/bits_per_byte" for name in SHARES}
    measured = [row for row in rows if keys["code"] in row]
    flops = train_flops_per_token(config.model, config.data.seq_len) * config.train.global_batch_tokens
    return {
        "seed": config.seed,
        "train": [round(row[nats], 4) for row in rows if nats in row],
        "eval_flops": [row["step"] * flops for row in measured],
        "bits_per_byte": [sum(SHARES[name] * row[keys[name]] for name in SHARES) for row in measured],
        "by_source": {name: measured[-1][keys[name]] for name in SHARES},
        "flops_per_step": flops,
    }


def all_runs(folder: Path, size: Size, seeds: int, jobs: int) -> dict[str, list[dict[str, Any]]]:
    """Return arm -> the run of each seed; finished runs are not repeated."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    configs = [(arm, config_of(folder, size, arm, seed)) for seed in range(seeds) for arm in ARMS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        paths = [Path(config.run_folder) / "done.json" for _, config in configs]
        futures = [
            None if path.exists() else pool.submit(train, config)
            for path, (_, config) in zip(paths, configs, strict=True)
        ]
        for path, future, (arm, config) in zip(paths, futures, configs, strict=True):
            if future is not None:
                seconds = future.result()
                path.write_text(json.dumps({**read(config), "seconds": seconds}))
            runs[arm].append(json.loads(path.read_text()))
            last = runs[arm][-1]
            text = f"{last['bits_per_byte'][-1]:.4f} bits per byte in {last['seconds']:.0f} s"
            print(f"seed {config.seed}, {arm}: {text}", file=sys.stderr, flush=True)
    return runs


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and the half width of its 95 % interval by Student's t."""
    half = T_975[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def summary(folder: Path, size: Size, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return for each arm its sizes, its bits per byte, and their difference from the dense model's."""
    dense = [run["bits_per_byte"][-1] for run in runs["dense"]]
    rows = {}
    for arm, seeds in runs.items():
        config = config_of(folder, size, arm, 0)
        params, steps = count(config.model), config.length.total_steps
        last = [run["bits_per_byte"][-1] for run in seeds]
        mean, half = interval(last)
        less, less_half = interval([a - b for a, b in zip(dense, last, strict=True)])
        rows[arm] = {
            "params_total": params.total,
            "params_active": params.active,
            "steps": steps,
            "tokens": steps * size.batch_tokens,
            "flops": steps * seeds[0]["flops_per_step"],
            "bits_per_byte": mean,
            "bits_per_byte_half": half,
            "less_than_dense": less,
            "less_than_dense_half": less_half,
            "by_source": {name: statistics.mean(run["by_source"][name] for run in seeds) for name in SHARES},
            "seconds": statistics.mean(run["seconds"] for run in seeds),
        }
    return rows


def show(rows: dict[str, Any]) -> None:
    """Print the table of the page."""
    print("\n| | parameters | active | steps | TFLOP | bits per byte | less than dense | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for arm, row in rows.items():
        less = f"{row['less_than_dense']:.4f} ± {row['less_than_dense_half']:.4f}" if ARMS[arm] else "-"
        print(
            f"| {arm} | {row['params_total'] / 1e6:.2f}M | {row['params_active'] / 1e6:.2f}M | {row['steps']} "
            f"| {row['flops'] / 1e12:.2f} | {row['bits_per_byte']:.4f} ± {row['bits_per_byte_half']:.4f} | {less} "
            f"| {row['seconds']:.0f} |"
        )


def pictures(runs: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Plot held-out bits per byte and smoothed training loss over FLOPs."""
    heldout, losses = [], []
    for colour, (arm, seeds) in enumerate(runs.items()):
        x = [flops / 1e12 for flops in seeds[0]["eval_flops"]]
        heldout += [Series(arm, x, run["bits_per_byte"], faint=True, colour=colour) for run in seeds]
        columns = zip(*(run["bits_per_byte"] for run in seeds), strict=True)
        heldout.append(Series(arm, x, [statistics.mean(column) for column in columns], colour=colour))
        means = [statistics.mean(column) for column in zip(*(run["train"] for run in seeds), strict=True)]
        width = max(1, len(means) // 40)
        smooth = [statistics.mean(means[max(0, i + 1 - width) : i + 1]) for i in range(len(means))]
        losses.append(Series(arm, [(i + 1) * seeds[0]["flops_per_step"] / 1e12 for i in range(len(means))], smooth))
    n = len(runs["dense"])
    return {
        "experts-heldout.svg": line_chart(
            heldout, title=f"Held-out bits per byte: mean of {n} seeds, each thin", x_label="training TFLOP", log_y=True
        ),
        "experts-loss.svg": line_chart(
            losses,
            title=f"Training cross-entropy (nats a token), mean of {n} seeds",
            x_label="training TFLOP",
            log_y=True,
        ),
    }


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/experts.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models on a twelfth of the corpus, two seeds")
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 11), metavar="2..10")
    parser.add_argument("--steps", type=int, help=f"of the dense model; absent: {Size.steps}")
    parser.add_argument("--lr", type=float, help=f"absent: {Size.lr:g}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a core each")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-experts"), help="where data and runs are kept")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/experts.json")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURES.relative_to(ROOT)}/experts-*.svg")
    options = parser.parse_args()
    base = QUICK if options.quick else Size()
    size = Size(**{**asdict(base), "steps": options.steps or base.steps, "lr": options.lr or base.lr})
    seeds = 2 if options.quick else options.seeds
    key = hashlib.sha256(f"{commit_of(ROOT)} {size!r}".encode() + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = Path(options.folder) / key
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.perf_counter()
    prepare(folder, size)
    runs = all_runs(folder, size, seeds, options.jobs)
    arms = summary(folder, size, runs)
    print(f"\n{seeds} seeds, {time.perf_counter() - begin_s:.0f} s in all")
    show(arms)
    if options.picture:
        PICTURES.mkdir(exist_ok=True)
        for name, svg in pictures(runs).items():
            (PICTURES / name).write_text(standalone(svg) + "\n")
            print("wrote", PICTURES / name)
    if options.record:
        print("wrote", record("experts", {"size": asdict(size), "seeds": seeds, "arms": arms, "runs": runs}))


if __name__ == "__main__":
    main()
