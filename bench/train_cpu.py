"""One training step on the CPU: Smalti, Hugging Face Trainer and litgpt on the same Llama, 2 threads.

    make bench NAME=train_cpu ARGS='--record'       # about 13 minutes; the peers are installed on first use

All start from the same weights (exported by Smalti; their first logits are compared), read the same batches in the
same order, use fused AdamW with the same settings, clip at the same norm and keep the learning rate constant; their
losses must stay within 1 % of each other at every step. Each runs its own complete loop in its own process, once eager
and once compiled; the faster of the two counts. They take turns of a few steps, so that the times of a round are
measured under the same conditions, and wait on a pipe in between.

bf16 is autocast over fp32 weights for the peers and ``precision: {compute: bf16, master: fp32}`` here. MFU is that of
``cost/flops.py`` over the matmul rate of ``distributed/trace/peak.py``, the higher of before and afterwards.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import Ratio, ratio_of
from peers import python_of
from record import RecordOption, record

from smalti.config.model import ModelConfig
from smalti.cost.flops import FORMULA, mfu, train_flops_per_token
from smalti.cost.params import count
from smalti.distributed.trace.peak import matmul_rate
from smalti.model.decoder import Decoder
from smalti.model.huggingface import save_folder
from smalti.model.init import init_weights

HERE = Path(__file__).resolve().parent
THREADS = 2
BATCHES = 64
WARM_STEPS = 2
LOSS_TOLERANCE_FRAC = 0.01
LOGITS_TOLERANCE = 1e-4
SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
ENVIRONMENTS = {"smalti": None, "trainer": "train-trainer", "litgpt": "train-litgpt"}


@dataclass(frozen=True)
class Shape:
    """A model, a batch and the number of steps in a turn."""

    why: str
    model: dict[str, int]
    tokens: int
    sequences: int
    steps: int

    @property
    def config(self) -> ModelConfig:
        """Return the model's config."""
        return ModelConfig(max_position_embeddings=self.tokens, **self.model)  # type: ignore[arg-type]


def _llama(vocab: int, width: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SHAPES = {
    "demo": Shape("the model of smalti demo, with its batch", _llama(4096, 128, 384, 3, 4), 256, 8, 6),
    "small": Shape("a first own model; 8 rows: Trainer's default", _llama(16384, 384, 1024, 6, 6), 512, 8, 1),
    "base": Shape("the width and depth of GPT-2 small", _llama(32000, 768, 2048, 12, 12), 1024, 2, 1),
}


@dataclass
class Contender:
    """One trainer in one mode, in its own process."""

    name: str
    mode: str
    process: subprocess.Popen[str]
    log: Path
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def answer(self) -> dict[str, Any]:
        """Return the next message that the process writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ({self.mode}) ended:\n{self.log.read_text()[-3000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def step(self) -> float:
        """Run one step; return its seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        message = self.answer()
        self.losses.append(message["loss"])
        return float(message["seconds"])

    def turn(self, steps: int) -> None:
        """Run a turn; its time is the median of its steps."""
        self.seconds.append(statistics.median(self.step() for _ in range(steps)))


# ---- the contest ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Print a table for each shape and precision; ``--record`` also writes bench/results/train_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: demo and small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), action="append", help="default: both")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the turns of one table, after warm-up")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/train_cpu.json")
    options = parser.parse_args()
    pythons = {name: python_of(env) if env else Path(sys.executable) for name, env in ENVIRONMENTS.items()}
    modes = ["eager", "compile"] if shutil.which(os.environ.get("CXX", "g++")) else ["eager"]
    if len(modes) == 1:
        print("no C++ compiler: torch.compile is left out")
    torch.set_num_threads(THREADS)
    figures: dict[str, Any] = {}
    for shape in options.shape or ["demo", "small"]:
        for precision in options.precision or ["bf16", "fp32"]:
            key = f"{shape} {precision}"
            figures[key] = contest(SHAPES[shape], precision, pythons, modes, options.seconds)
            report(key, SHAPES[shape], figures[key])
    if options.record:
        print("wrote", record("train_cpu", figures))


def contest(shape: Shape, precision: str, pythons: dict[str, Path], modes: list[str], seconds: float) -> dict[str, Any]:
    """Measure one table: start all contenders, check that they compute the same, and run turns."""
    before, _ = matmul_rate(torch.device("cpu"), precision)
    with tempfile.TemporaryDirectory(prefix="train-cpu-") as place:
        prepare(shape, Path(place))
        contenders: list[Contender] = []
        try:
            for name, python in pythons.items():
                for mode in modes:
                    contenders.append(start(name, mode, precision, python, Path(place)))
            compare_logits(contenders)
            for contender in contenders:
                for _ in range(WARM_STEPS):
                    contender.step()
            turns = max(5, round(seconds / sum(c.step() for c in contenders) / shape.steps))
            for turn in range(turns):
                for contender in contenders if turn % 2 else reversed(contenders):
                    contender.turn(shape.steps)
            spread = compare_losses(contenders)
        finally:
            for contender in contenders:
                contender.process.kill()
                contender.process.wait()
    after, _ = matmul_rate(torch.device("cpu"), precision)
    return summary(shape, contenders, max(before, after), spread)


def prepare(shape: Shape, place: Path) -> None:
    """Write weights in Hugging Face's format, and the batches."""
    model = Decoder(shape.config)
    init_weights(model, shape.config, seed=17)
    save_folder(place / "model", shape.config, model.state_dict(), eod_id=0, dtype=torch.float32)
    np.save(place / "tokens.npy", synthetic_tokens(shape))


def synthetic_tokens(shape: Shape) -> Any:
    """Return tokens [BATCHES, sequences, tokens]; each token is followed by one of 32, by Zipf's law."""
    random = np.random.default_rng(17)
    vocab = shape.config.vocab_size
    rows = BATCHES * shape.sequences
    followers = (vocab * random.random((vocab, 32)) ** 4).astype(np.int64)  # small ids are frequent
    shares = 1 / np.arange(1, 33)
    tokens = np.empty((shape.tokens, rows), dtype=np.int64)
    tokens[0] = random.integers(0, vocab, rows)
    for column in range(1, shape.tokens):
        tokens[column] = followers[tokens[column - 1], random.choice(32, rows, p=shares / shares.sum())]
    return tokens.T.reshape(BATCHES, shape.sequences, shape.tokens)


def start(name: str, mode: str, precision: str, python: Path, place: Path) -> Contender:
    """Start a contender and wait until it has written its logits."""
    folder = place / f"{name}-{mode}"
    folder.mkdir()
    job = {
        **SETTINGS,
        "model": str(place / "model"),
        "tokens": str(place / "tokens.npy"),
        "folder": str(folder / "run"),
        "logits": str(folder / "logits.npy"),
        "precision": precision,
        "compile": mode == "compile",
        "threads": THREADS,
    }
    (folder / "job.json").write_text(json.dumps(job))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(python), "-W", "ignore", str(HERE / "peers" / f"train_{name}.py"), str(folder / "job.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"},
        )
    contender = Contender(name, mode, process, folder / "log")
    contender.answer()
    return contender


def compare_logits(contenders: list[Contender]) -> None:
    """Raise RuntimeError unless all compute the same logits before the first step."""
    first, *others = contenders
    expected = np.load(first.log.parent / "logits.npy")
    for other in others:
        apart = float(np.abs(np.load(other.log.parent / "logits.npy") - expected).max())
        if not apart < LOGITS_TOLERANCE:
            raise RuntimeError(f"first logits of {other.name} differ from {first.name}'s by {apart:.2e}")


def compare_losses(contenders: list[Contender]) -> float:
    """Return the largest relative difference between two losses of a step."""
    losses = np.array([c.losses for c in contenders])
    spread = float((losses.max(axis=0) / losses.min(axis=0) - 1).max())
    if not spread < LOSS_TOLERANCE_FRAC:
        raise RuntimeError(f"losses at one step are up to {spread:.2%} apart:\n{losses}")
    return spread


# ---- figures --------------------------------------------------------------------------------------------------------


def summary(shape: Shape, contenders: list[Contender], peak: float, spread: float) -> dict[str, Any]:
    """Return the figures that are printed and recorded."""
    tokens, flops = shape.sequences * shape.tokens, train_flops_per_token(shape.config, shape.tokens)
    rows = {}
    best: dict[str, Contender] = {}
    for contender in contenders:
        per_s = tokens / statistics.median(contender.seconds)
        rows[f"{contender.name} {contender.mode}"] = {"tokens_per_s": per_s, "mfu_frac": mfu(per_s, flops, peak)}
        rival = best.get(contender.name)
        if rival is None or statistics.median(contender.seconds) < statistics.median(rival.seconds):
            best[contender.name] = contender
    ratios = {name: _ratio(peer, best["smalti"]) for name, peer in best.items() if name != "smalti"}
    return {
        "contenders": rows,
        "ratios": {name: ratio.figures() for name, ratio in ratios.items()},
        "matmul_flops_per_s": peak,
        "loss_first": contenders[0].losses[0],
        "loss_last": contenders[0].losses[-1],
        "loss_spread_frac": spread,
        "steps": len(contenders[0].losses),
    }


def _ratio(peer: Contender, ours: Contender) -> Ratio:
    names = (f"{peer.name} {peer.mode}", f"{ours.name} {ours.mode}")
    return ratio_of(peer.seconds, ours.seconds, names=names)


def report(key: str, shape: Shape, figures: dict[str, Any]) -> None:
    """Print one table."""
    print(
        f"\n{key}: {shape.why}; {count(shape.config).total / 1e6:.1f}M parameters, "
        f"{shape.sequences} x {shape.tokens} tokens a step, {THREADS} threads\n"
        f"matmul {figures['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s; loss {figures['loss_first']:.3f} -> "
        f"{figures['loss_last']:.3f} in {figures['steps']} steps, at most {figures['loss_spread_frac']:.3%} apart\n"
    )
    for name, row in figures["contenders"].items():
        print(f"  {name:16} {row['tokens_per_s']:8,.0f} tokens/s   {row['mfu_frac']:6.1%} of it ({FORMULA})")
    for ratio in figures["ratios"].values():
        print(f"  {Ratio(**ratio)}")


if __name__ == "__main__":
    main()
