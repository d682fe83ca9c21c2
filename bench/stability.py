"""Stability options: a small model at 1, 3, 10 and 30 times its learning rate.

    make bench NAME=stability                                                    about 12 minutes on two cores
    make bench NAME=stability ARGS='--variants plain qk_norm --factors 1 30 --steps 60'

Runs ``smalti train`` on a deep and narrow Llama with one wide head in fp32 with a short warmup, on the code and
documentation of the installed Python; weights, data and order are the same in every cell, with one option or all added.
A cell *diverged* if the loss became non-finite, or ended within ``NOTHING_NATS`` of the unigram entropy. Its *spike* is
the highest rise of the loss (mean over 5 steps) above its lowest value before. After Wortsman et al. 2023 (arXiv
2309.14322). ``--record`` writes bench/results/stability.json, ``--picture`` the plot for the docs.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from record import RecordOption, record
from same_curve import VOCAB_SIZE, prepare

from smalti.base.chart import Series, line_chart, standalone
from smalti.config.load import dump, from_dict
from smalti.config.run import RunConfig
from smalti.data.tokens import TokenSource

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "concepts" / "pictures" / "stability.svg"
LAYERS, SEQ_LEN, ROWS, BASE_LR = 8, 128, 8, 3e-3
FACTORS = (1, 3, 10, 30)
NOTHING_NATS = 0.1
SMOOTHED_STEPS = 5

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_norm": {"model.qk_norm": "head"},
    "z_loss": {"train.loss.z_loss_coef": 1e-4},
    "embedding_norm": {"model.embedding_norm": "true"},
    "clip_qkv": {"model.clip_qkv": 8},
    "soft_caps": {"model.attn_logit_softcapping": 50, "model.final_logit_softcapping": 30},
    "residual_scale": {"model.residual_multiplier": round((2 * LAYERS) ** -0.5, 3)},
}
VARIANTS["all"] = {key: value for options in VARIANTS.values() for key, value in options.items()}


@dataclass(frozen=True)
class Cell:
    """Result of one run."""

    variant: str
    factor: float
    lr: float
    final_loss: float | None
    """Mean over the last tenth of the steps; None if the loss became non-finite."""
    spike: float
    """Highest rise of the smoothed loss above its lowest value before, in nats."""
    highest_grad_norm: float
    steps: int
    """Steps with a finite loss."""
    diverged: bool
    loss: tuple[float, ...]


def recipe(folder: Path, steps: int) -> Path:
    """Write the recipe of the plain model; cells differ by overrides."""
    config = from_dict(
        RunConfig,
        {
            "name": "stability",
            "model": {
                "family": "decoder",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 176,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 1,
                "max_position_embeddings": SEQ_LEN,
            },
            "data": {
                "sources": {name: str(folder / name) for name in ("code", "prose")},
                "tokenizer": str(folder / "tokenizer"),
                "seq_len": SEQ_LEN,
                "stages": [{"weights": {"code": 0.5, "prose": 0.5}}],
            },
            "train": {
                "duration": f"{steps}step",
                "global_batch_tokens": ROWS * SEQ_LEN,
                "optimizer": {"lr": BASE_LR},
                "schedule": {"warmup": "0.1run", "decay": "0.2run"},
                "precision": {"compute": "fp32"},
                "checkpoint": {"every": "1run", "keep": 1},
                "parallel": {"device": "cpu", "threads": 1},
            },
            "track": {"console": False},
        },
        "stability",
    ).config
    path = folder / "stability.yaml"
    path.write_text(dump(config))
    return path


def train(folder: Path, variant: str, factor: float, unigram: float, also: list[str]) -> Cell:
    """Run one cell with ``smalti train`` and read its metrics."""
    name, lr = f"{variant}-x{factor:g}", BASE_LR * factor
    run = folder / "runs" / name
    overrides = {"name": name, "folder": str(run), "train.optimizer.lr": lr, **VARIANTS[variant]}
    command = [sys.executable, "-m", "smalti", "train", str(folder / "stability.yaml")]
    done = subprocess.run(
        [*command, *also, *(f"{key}={value}" for key, value in overrides.items())],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "loss/train/total" in line]
    if done.returncode not in (0, 3) or not rows:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    loss = [float(row["loss/train/cross_entropy"]) for row in rows]
    finite = done.returncode == 0
    final = statistics.fmean(loss[-max(1, len(loss) // 10) :]) if finite else None
    cell = Cell(
        variant=variant,
        factor=factor,
        lr=lr,
        final_loss=final,
        spike=highest_rise(loss),
        highest_grad_norm=max(float(row["l2_norm/grad/global"]) for row in rows),
        steps=len(loss),
        diverged=final is None or final >= unigram - NOTHING_NATS,
        loss=tuple(round(value, 4) for value in loss),
    )
    print(f"{name:20} {shown(cell)}", file=sys.stderr, flush=True)
    return cell


def highest_rise(loss: list[float]) -> float:
    """Return the highest rise of the smoothed loss above its lowest value before."""
    smooth = np.convolve(loss, np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, mode="valid")
    return float((smooth - np.minimum.accumulate(smooth)).max()) if len(smooth) else 0.0


def unigram_entropy(folder: Path) -> float:
    """Return the unigram entropy in nats per token, over both sources in equal parts."""
    total = np.zeros(VOCAB_SIZE)
    for name in ("code", "prose"):
        source = TokenSource(folder / name)
        counts = np.bincount(source.read(0, source.manifest.n_tokens), minlength=VOCAB_SIZE)
        total += counts / counts.sum() / 2
    return float(-(total[total > 0] * np.log(total[total > 0])).sum())


def shown(cell: Cell) -> str:
    """Format a cell of the table: final loss, and the spike in brackets."""
    if cell.final_loss is None:
        return f"not finite at {cell.steps + 1}"
    return f"{cell.final_loss:.2f} (+{cell.spike:.2f}){' !' if cell.diverged else ''}"


def table(cells: Mapping[tuple[str, float], Cell], variants: list[str], factors: list[float]) -> str:
    """Return a Markdown table: a row for each option, a column for each learning rate."""
    lines = ["| | " + " | ".join(f"x{factor:g} ({BASE_LR * factor:g})" for factor in factors) + " |"]
    lines.append("|---" * (len(factors) + 1) + "|")
    for variant in variants:
        lines.append(f"| {variant} | " + " | ".join(shown(cells[variant, factor]) for factor in factors) + " |")
    return "\n".join(lines)


def picture(cells: Mapping[tuple[str, float], Cell], variants: list[str], factors: list[float], unigram: float) -> str:
    """Plot final loss over the learning rate, a line for each option; a line ends where the loss was not finite."""
    rates = [BASE_LR * factor for factor in factors]
    lines = [
        Series(variant, rates, [cells[variant, factor].final_loss or math.nan for factor in factors])
        for variant in variants
    ]
    known = Series("frequencies of tokens", rates, [unigram] * len(rates), faint=True, colour=7)
    title = f"Final loss (nats a token) by learning rate; {unigram:.2f} is a model of token frequencies"
    return line_chart([*lines, known], title=title, x_label="learning rate", log_x=True)


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/stability.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--factors", nargs="+", type=float, default=list(FACTORS))
    parser.add_argument("--also", nargs="+", default=[], help="overrides for every cell: train.schedule.warmup=0.2run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--folder", help="folder for the runs; absent: a temporary one")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/stability.json")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="stability-") as temporary:
        folder = Path(temporary)
        prepare(folder)
        recipe(folder, options.steps)
        unigram = unigram_entropy(folder)
        ladder = [(variant, factor) for factor in options.factors for variant in options.variants]
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda cell: train(folder, *cell, unigram, options.also), ladder))
    cells = dict(zip(ladder, results, strict=True))
    print(f"\n{options.steps} steps of {ROWS} x {SEQ_LEN} tokens; frequencies of tokens: {unigram:.2f} nats; "
          "final loss (+ highest spike), ! diverged\n")  # fmt: skip
    print(table(cells, options.variants, options.factors))
    if options.picture:
        PICTURE.write_text(standalone(picture(cells, options.variants, options.factors, unigram)) + "\n")
        print("wrote", PICTURE)
    if options.record:
        figures = {
            "steps": options.steps,
            "also": options.also,
            "unigram_loss": unigram,
            "cells": [asdict(cell) for cell in results],
        }
        print("wrote", record("stability", figures))


if __name__ == "__main__":
    main()
