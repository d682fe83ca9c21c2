"""The effect of the data order on a small model: a corpus that is sorted by source on disk, read in four orders.

    make bench NAME=shuffle                             three seeds, about 15 minutes on two cores
    make bench NAME=shuffle ARGS='--steps 60 --seeds 1'

The sources of the installed Python (tables of encodings, docstrings and help texts, library code), concatenated in this
order, are cut into sequences; one pass over them trains the same small Llama from the same weights in the same number
of steps, in each order:

    ours      the stream's keyed permutation of all sequences
    linear    a * x + b mod n, with a drawn by the seed: as cheap, and used by some loaders
    blocks    shuffled inside blocks of a 32nd of the corpus, as by a shuffle buffer or one shard at a time
    sorted    in the order on disk

Every 20th sequence is held out. A completed run is kept in build/bench-shuffle and not repeated on the same commit.
``--record`` writes bench/results/shuffle.json, ``--picture`` the curves for the docs.
"""

import argparse
import hashlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from record import RecordOption, commit_of, record

from smalti.base.chart import Series, line_chart, standalone
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.run import JobConfig
from smalti.config.train import LossConfig
from smalti.data.documents.installed_python import write_documents
from smalti.data.order.permutation import Permutation
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.distributed.group import world as worlds
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
from smalti.train import Hook, build, fit
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "concepts" / "pictures" / "shuffle.svg"
KINDS = {"tables": 0.15, "prose": 0.35, "library": 0.5}
"""Parts of the corpus in their order on disk, with their share of the tokens."""
SEQ_LEN, ROWS, VOCAB_SIZE, BLOCKS = 128, 16, 2048, 32
HELD_OUT_EVERY = 20
EVALUATIONS = 16
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Sequences [n, SEQ_LEN + 1] in their order on disk, and the kind of each."""

    rows: Int64s
    kinds: Int64s
    held_out: Int64s
    held_out_kinds: Int64s


def linear(n: int, seed: int) -> Int64s:
    """Return the order a * x + b mod n, with a and n coprime."""
    random = np.random.default_rng(seed)
    a = int(random.integers(1, n))
    while math.gcd(a, n) != 1:
        a = int(random.integers(1, n))
    return (a * np.arange(n, dtype=np.int64) + int(random.integers(0, n))) % n


def blocks(n: int, seed: int) -> Int64s:
    """Return an order that is shuffled inside blocks, which stay in their order."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.permutation(part) for part in np.array_split(np.arange(n), BLOCKS)])


ORDERS: dict[str, Callable[[int, int], Int64s]] = {
    "ours": lambda n, seed: Permutation(n, seed)(np.arange(n)),
    "linear": linear,
    "blocks": blocks,
    "sorted": lambda n, seed: np.arange(n),
}


def corpus(steps: int) -> Corpus:
    """Build the sequences of each kind, as many as the steps and the held-out part need."""
    wanted = math.ceil(steps * ROWS * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1)) + len(KINDS)
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        write_documents(folder)
        for name in ("code", "prose"):
            for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines():
                record = json.loads(line)
                tables = record["group"].startswith(("encodings/cp", "encodings/iso", "encodings/mac", "encodings/koi"))
                texts["prose" if name == "prose" else "tables" if tables else "library"].append(record["text"])
    sample = [text[:4000] for of in texts.values() for text in of]
    tokenizer = Tokenizer(train_bpe(sample, VOCAB_SIZE), "<|endoftext|>")
    rows, kinds = [], []
    for number, (kind, share) in enumerate(KINDS.items()):
        n = math.ceil(wanted * share)
        cut = _cut(tokenizer, texts[kind], n, kind)
        rows.append(cut)
        kinds.append(np.full(len(cut), number))
    all_rows = np.concatenate(rows)
    all_kinds = np.concatenate(kinds)
    held = np.arange(len(all_rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
    train = all_rows[~held]
    # exactly one pass; the sequences that are left out are evenly spaced
    chosen = np.linspace(0, len(train) - 1, steps * ROWS).astype(np.int64)
    return Corpus(train[chosen], all_kinds[~held][chosen], all_rows[held], all_kinds[held])


def _cut(tokenizer: Tokenizer, texts: list[str], n: int, kind: str) -> Int64s:
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text), tokenizer.eod_id]
        if len(ids) > n * SEQ_LEN:
            break
    n = min(n, (len(ids) - 1) // SEQ_LEN)
    if not n:
        raise RuntimeError(f"the installed Python has too little of '{kind}'")
    flat = np.array(ids[: n * SEQ_LEN + 1], dtype=np.int64)
    return flat[np.arange(n)[:, None] * SEQ_LEN + np.arange(SEQ_LEN + 1)]


class Rows:
    """Batches of sequences in a given order, one microbatch per step."""

    def __init__(self, rows: Int64s) -> None:
        self._rows = torch.from_numpy(rows)
        self._positions = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)

    def batch(self, step: int) -> list[Microbatch]:
        """Return the microbatch of a step; attention covers the whole row, because documents are short."""
        rows = self._rows[step * ROWS : (step + 1) * ROWS]
        return [Microbatch(rows[:, :-1], rows[:, 1:], self._positions[: len(rows)], None)]

    def state(self, *_: Any) -> dict[str, Any]:
        """Return no state: the run is not resumed."""
        return {}

    def check(self, *_: Any) -> None:
        """Do nothing: there is no state to check."""


class Losses(Hook):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.train: list[float] = []

    def on_step(self, job: Any, result: Any) -> None:
        """Append the loss, in nats per token."""
        self.train.append(float(result.loss))


def shape() -> ModelConfig:
    """Return the config of a model of 0.5M parameters."""
    return ModelConfig.model_validate(
        {
            "family": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": SEQ_LEN,
            "tie_word_embeddings": True,
        }
    )


def train(data: Corpus, order: Int64s, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train one run; returns the losses of its steps, and the held-out losses over all kinds and by kind."""
    model = Decoder(shape())
    init_weights(model, shape(), seed=seed)
    loss = LanguageLoss(shape(), LossConfig())
    losses = Losses()
    held_out: list[tuple[int, list[float]]] = []
    counts = np.bincount(data.held_out_kinds, minlength=len(KINDS))

    def evaluate(module: Any, step: int) -> dict[str, float]:
        by_kind = []
        with torch.no_grad():
            for kind in range(len(KINDS)):
                rows = data.held_out[data.held_out_kinds == kind]
                batches = [Rows(rows[at : at + ROWS]).batch(0)[0] for at in range(0, len(rows), ROWS)]
                sums = [loss(module, batch)[:2] for batch in batches]
                by_kind.append(float(sum(total for total, _ in sums)) / float(sum(weight for _, weight in sums)))
        held_out.append((step, by_kind))
        return {}

    config = from_dict(
        JobConfig,
        {
            "name": "shuffle",
            "folder": str(folder),
            "seed": seed,
            "train": {
                "duration": f"{steps}step",
                "global_batch_tokens": ROWS * SEQ_LEN,
                "optimizer": {"lr": 3e-3},
                "schedule": {"warmup": "0.05run", "decay": "0.2run"},
                "precision": {"compute": "fp32"},
                "parallel": {"device": "cpu", "compile": False},
                "checkpoint": {"every": "1run", "keep": 1},
                "eval_every": f"{max(1, steps // EVALUATIONS)}step",
            },
            "track": {"console": False},
        },
    ).config
    begin_s = time.perf_counter()
    try:
        batches = Rows(data.rows[order])
        fit(build(config, model=model.train(), loss=loss, batches=batches, evaluate=evaluate, hooks=[losses]))
    finally:
        worlds.leave()
    return {
        "seed": seed,
        "train": [round(value, 4) for value in losses.train],
        "eval_steps": [step for step, _ in held_out],
        "held_out": [float(np.average(by_kind, weights=counts)) for _, by_kind in held_out],
        "held_out_by_kind": dict(zip(KINDS, held_out[-1][1], strict=True)),
        "apart": mixing(data.kinds[order]),
        "seconds": time.perf_counter() - begin_s,
    }


def mixing(kinds: Int64s) -> float:
    """Return the largest difference between the shares of kinds in a batch and in the corpus, averaged over steps."""
    shares = np.bincount(kinds, minlength=len(KINDS)) / len(kinds)
    of_batches = np.stack([np.bincount(row, minlength=len(KINDS)) / ROWS for row in kinds.reshape(-1, ROWS)])
    return float(np.abs(of_batches - shares).max(axis=1).mean())


def picture(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Plot the held-out loss over the steps: the mean over the seeds."""
    series = []
    for number, (name, of) in enumerate(runs.items()):
        mean = np.mean([run["held_out"] for run in of], axis=0)
        if len(of) > 1:
            series += [Series(name, run["eval_steps"], run["held_out"], faint=True, colour=number) for run in of]
        series.append(Series(name, of[0]["eval_steps"], mean.tolist(), colour=number))
    seeds = f"{len(of)} seeds" if len(of) > 1 else "one seed"
    title = f"Held-out loss (nats per token) of a small model on a corpus sorted by source, {seeds}"
    return standalone(line_chart(series, title=title, x_label="step", log_y=True)) + "\n"


def all_runs(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return order -> the run of each seed: saved runs, and at most ``--runs`` new ones."""
    names = [name for name in ORDERS if name in options.orders.split(",")]
    version = hashlib.sha256(commit_of(ROOT).encode() + Path(__file__).read_bytes()).hexdigest()[:12]
    saved = Path(options.folder) / version
    saved.mkdir(parents=True, exist_ok=True)
    data = None
    left = options.runs
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(options.seeds):
        for name in names:
            path = saved / f"{options.steps}-{name}-{seed}.json"
            if not path.exists() and left:
                data = data or corpus(options.steps)
                left -= 1
                order = ORDERS[name](len(data.rows), seed)
                assert (np.sort(order) == np.arange(len(data.rows))).all()
                with tempfile.TemporaryDirectory() as folder:
                    path.write_text(json.dumps(train(data, order, seed, options.steps, Path(folder) / name)))
            if path.exists():
                runs[name].append(json.loads(path.read_text()))
                last = runs[name][-1]
                print(f"seed {seed}, {name}: {last['held_out'][-1]:.4f} in {last['seconds']:.0f} s", flush=True)
    return runs


def show(figures: dict[str, Any]) -> None:
    """Print the losses at the end, with the range over the seeds."""
    sequences = f"{figures['sequences']:,} sequences of {SEQ_LEN} tokens"
    print(f"\n{sequences} in {figures['steps']} steps; held-out loss at the end, mean (range over seeds)")
    print(f"{'order':10}{'all':>24}" + "".join(f"{kind:>10}" for kind in KINDS) + f"{'batch apart':>13}")
    for name, runs in figures["runs"].items():
        last = [run["held_out"][-1] for run in runs]
        kinds = [statistics.mean(run["held_out_by_kind"][kind] for run in runs) for kind in KINDS]
        apart = statistics.mean(run["apart"] for run in runs)
        text = f"{statistics.mean(last):.4f} ({min(last):.4f} to {max(last):.4f})"
        print(f"{name:10}{text:>24}" + "".join(f"{value:10.4f}" for value in kinds) + f"{apart:13.3f}")


def main() -> None:
    """Print the table; ``--record`` also writes bench/results/shuffle.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", default=",".join(ORDERS), help=f"of {', '.join(ORDERS)}")
    parser.add_argument(
        "--runs", type=int, default=1000, help="train at most so many new runs; saved ones do not count"
    )
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-shuffle"), help="folder of the saved runs")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/shuffle.json")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    options = parser.parse_args()
    unknown = set(options.orders.split(",")) - set(ORDERS)
    if unknown:
        parser.error(f"no order {', '.join(sorted(unknown))}; there are {', '.join(ORDERS)}")
    logging.getLogger("smalti").setLevel(logging.WARNING)
    runs = all_runs(options)
    if any(len(of) < options.seeds for of in runs.values()):
        print("not all runs are done: run the same command again to continue")
        return
    figures = {"sequences": options.steps * ROWS, "steps": options.steps, "runs": runs}
    show(figures)
    if options.picture:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture(runs))
        print("wrote", PICTURE)
    if options.record:
        print("wrote", record("shuffle", figures))


if __name__ == "__main__":
    main()
