"""Longer contexts: a small model trained at 512 tokens finds needles at 2,048 after a rule and a short training.

    make bench NAME=long_context                                      three seeds, about 15 minutes on two idle cores
    make bench NAME=long_context ARGS='--seeds 1 --rules yarn linear ntk'

The model (Qwen 3, 2 layers, the first with a window of 4) learns the documentation of the installed Python and
synthetic texts: facts with questions, and random words that repeat. It is then extended by four, with texts of up to
2,048 tokens. Accuracies are those of ``needle_TOKENS`` (chance 0.1); no training text has a pair of place and password
of theirs. The held-out text is read at 512 tokens. ``--record`` writes bench/results/context_extension.json.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from demo_runs import smalti
from record import ROOT, RecordOption, record

from smalti.data.documents.installed_python import write_documents
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens import TokenWriter
from smalti.evals.tasks.needles import training_texts

SHORT, LONG = 512, 2048
LENGTHS = (512, 1024, 1536, 2048)
VOCAB_SIZE, TEXT_BYTES, WIDTH_PER_HEAD = 1024, 3_000_000, 32
FACTOR = LONG // SHORT
RULES: dict[str, dict[str, Any]] = {
    "none": {"max_position_embeddings": LONG},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": FACTOR}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": FACTOR}},
    "ntk": {
        "rope_theta": round(10_000.0 * FACTOR ** (WIDTH_PER_HEAD / (WIDTH_PER_HEAD - 2))),
        "max_position_embeddings": LONG,
    },
}
SYNTHETIC = {"tiny": (48, 128, 14_000), "short": (128, SHORT, 4_500), "long": (SHORT, LONG, 1_000)}
"""Source -> tokens of its shortest and longest text, and number of texts."""


def prepare(folder: Path) -> None:
    """Write the tokenizer and the token files, once."""
    if (folder / "finished").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_documents(str(folder / "documents"))
    texts, size = [], 0
    for line in (folder / "documents/prose.jsonl").read_text().splitlines():
        if size < TEXT_BYTES:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
    parts = {"heldout": texts[::20], "text": [text for number, text in enumerate(texts) if number % 20]}
    examples = list(islice(training_texts(0, 300), 400))
    inner = train_bpe([text[:4000] for text in parts["text"]] + examples, VOCAB_SIZE)
    tokenizer = Tokenizer(inner, "<|endoftext|>")
    tokenizer.save(folder / "tokenizer")
    for seed, (name, (shortest, longest, n_texts)) in enumerate(SYNTHETIC.items(), 1):
        parts[name] = list(islice(synthetic(seed, shortest, longest, tokenizer), n_texts))
    for name, documents in parts.items():
        with TokenWriter(
            folder / name,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_digest=tokenizer.digest,
        ) as writer:
            for text in documents:
                writer.add(tokenizer.encode(text), len(text.encode()))
    (folder / "finished").touch()


def synthetic(seed: int, shortest: int, longest: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield training texts of lengths between the two, in tokens."""

    @lru_cache(100_000)
    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    draw, of_length = random.Random(seed), {}
    while True:
        n_tokens = draw.randrange(shortest, longest + 1) // 16 * 16
        yield next(of_length.setdefault(n_tokens, training_texts(seed, n_tokens - 8, count)))


def train(folder: Path, name: str, seed: int, changes: dict[str, Any]) -> None:
    """Train and export a run on one rank and one thread; a finished one is not repeated."""
    if (folder / name / "export/config.json").exists():
        return
    tree: dict[str, Any] = {
        "name": Path(name).name,
        "folder": name,
        "seed": seed,
        "data": {
            "tokenizer": "data/tokenizer",
            "sources": {source: f"data/{source}" for source in changes.pop("sources")},
            "seq_len": SHORT,
            "stages": changes.pop("stages"),
        },
        **changes,
    }
    tree["train"] |= {
        "precision": {"compute": "fp32"},
        "checkpoint": {"every": "1run"},
        "parallel": {"device": "cpu", "threads": 1},
    }
    (folder / f"{name.replace('/', '-')}.yaml").write_text(yaml.safe_dump(tree))
    smalti(folder, "train", f"{name.replace('/', '-')}.yaml")
    smalti(folder, "export", name)


def train_base(folder: Path, name: str, seed: int, steps: int) -> None:
    """Train the short model, first on short sequences: it learns to copy there much faster."""
    model = {
        "family": "qwen3",
        "qk_norm": "head",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": WIDTH_PER_HEAD,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": SHORT,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    }
    stages = [
        {"until": "0.4run", "seq_len": 128, "weights": {"tiny": 0.8, "text": 0.2}},
        {"weights": {"text": 0.4, "short": 0.6}},
    ]
    schedule = {"warmup": "0.08run", "decay": "0.4run"}
    length = {"duration": f"{steps}step", "global_batch_tokens": 4096, "optimizer": {"lr": 4e-3}, "schedule": schedule}
    train(folder, name, seed, {"model": model, "sources": ("text", "tiny", "short"), "stages": stages, "train": length})


def extend(folder: Path, name: str, base: str, seed: int, rule: str, steps: int, lr: float) -> None:
    """Continue the short model at the long length under a rule."""
    stages = [{"seq_len": LONG, "weights": {"text": 0.5, "long": 0.5}}]
    schedule = {"warmup": "0.1run", "decay": "0.6run"}
    length = {"duration": f"{steps}step", "global_batch_tokens": 8192, "optimizer": {"lr": lr}, "schedule": schedule}
    changes = {"init_from": f"{base}/export", "model": RULES[rule], "train": length}
    train(folder, name, seed, {**changes, "sources": ("text", "long"), "stages": stages})


def longer(folder: Path, base: str, rule: str) -> str:
    """Return a copy of an export with another context, untrained."""
    target = f"{base}-{rule}-untrained"
    shutil.rmtree(folder / target, ignore_errors=True)
    shutil.copytree(folder / base / "export", folder / target)
    path = folder / target / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": LONG}
    if rule == "yarn":
        rope = {**RULES[rule]["rope_scaling"], "original_max_position_embeddings": SHORT}
        key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
        config[key] = {**(config.get(key) or {}), **rope}
    path.write_text(json.dumps(config))
    return target


def evaluate(folder: Path, model: str, n: int) -> dict[str, Any]:
    """Return needle accuracies by length, those of the longest by depth, and held-out bits per byte at 512 tokens."""
    tasks = ", ".join(("heldout", *(f"needle_{length}" for length in LENGTHS)))
    smalti(folder, "eval", "run", model, f"tasks=[{tasks}]", "heldout.text=data/heldout", f"seq_len={SHORT}",
           f"n={n}", "--output", f"{model}-evals", "--dtype", "fp32")  # fmt: skip
    newest = sorted((folder / f"{model}-evals").rglob("results.json"))[-1]
    scores = json.loads(newest.read_text())["tasks"]
    needles = {str(length): scores[f"needle_{length}"] for length in LENGTHS}
    return {
        "bits_per_byte": scores["heldout/text"]["value"],
        "accuracy": {length: score["value"] for length, score in needles.items()},
        "interval": {length: score["interval"] for length, score in needles.items()},
        "by_depth": {depth: part["accuracy"] for depth, part in needles[str(LONG)]["categories"].items()},
    }


def of_seed(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a seed: before, the rule without training, and after each rule."""
    base = f"runs/base-{options.steps}-{seed}"
    train_base(folder, base, seed, options.steps)
    models = {"before": longer(folder, base, "none"), "yarn, untrained": longer(folder, base, "yarn")}
    for rule in options.rules if seed == 0 else ["yarn"]:
        name = f"runs/{rule}-{options.steps}-{options.more_steps}-{options.lr:g}-{seed}"
        extend(folder, name, base, seed, rule, options.more_steps, options.lr)
        models[rule] = f"{name}/export"
    rows = []
    for name, model in models.items():
        rows.append({"seed": seed, "model": name, **evaluate(folder, model, options.n)})
        rows[-1]["change_frac"] = rows[-1]["bits_per_byte"] / rows[0]["bits_per_byte"] - 1
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row of the Markdown table."""
    accuracies = " | ".join(f"{value:.3f}" for value in row["accuracy"].values())
    loss = f"{row['bits_per_byte']:.4f} ({100 * row['change_frac']:+.2f} %)"
    return f"| {row['seed']} | {row['model']} | {accuracies} | {loss} |"


def main() -> None:
    """Print the table; ``--record`` also writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, 2 ...")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=["yarn", "linear", "ntk", "none"],
                        help="trained with seed 0; the other seeds train yarn")  # fmt: skip
    parser.add_argument("--steps", type=int, default=600, help="of the short model, 4,096 tokens each")
    parser.add_argument("--more-steps", type=int, default=40, help="at the long length, 8,192 tokens each")
    parser.add_argument("--lr", type=float, default=1e-3, help="at the long length")
    parser.add_argument("--n", type=int, default=100, help="questions of each length")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at one time, a core each")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-long-context"), help="keeps data and runs")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/context_extension.json")
    options = parser.parse_args()
    folder = Path(options.folder)
    prepare(folder / "data")
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [
            row for seed in pool.map(lambda seed: of_seed(folder, seed, options), range(options.seeds)) for row in seed
        ]
    columns = " | ".join(f"needle_{length}" for length in LENGTHS)
    print(f"\n| seed | model | {columns} | bits per byte at {SHORT} |\n|---{'|---' * (len(LENGTHS) + 2)}|")
    print("\n".join(map(line, rows)))
    if options.record:
        settings = {name: getattr(options, name) for name in ("steps", "more_steps", "lr", "n", "rules")}
        print("wrote", record("context_extension", {"settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
