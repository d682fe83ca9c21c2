"""Memorisation before and after deduplication: passages repeated up to 200 times, and what a small model repeats.

    make bench NAME=memorised                        4 minutes on one core
    make bench NAME=memorised ARGS='--steps 100 --windows 200'

The docstrings and help texts of the installed Python are cut into documents of about 1,500 characters. Passages from
other places of them are inserted as paragraphs into training documents: ``COPIES``. ``smalti data build`` writes the
set as it is, and with ``dedup: near`` and ``repeats: passages``. The same model trains the same number of steps on
each, and ``smalti eval memorised`` measures both on the same windows of the set as it is, and each on its own set.
``--record`` writes bench/results/memorised.json.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from demo_runs import smalti
from record import RecordOption, record

from smalti.data.documents.heldout import TRAIN, split_of
from smalti.data.documents.installed_python import write_documents

COPIES = {200: 2, 40: 4, 5: 8}
"""Copies of a passage -> number of such passages."""
DOCUMENT_CHARACTERS, PASSAGE_CHARACTERS = 1500, 1200
HELDOUT_FRAC, SEED = 0.1, 17
SETS = {"repeated": {"dedup": "none"}, "deduplicated": {"dedup": "near", "repeats": "passages"}}


def write_corpus(folder: Path) -> None:
    """Write ``pages.jsonl``: documents, with copies of passages that are in no other document."""
    write_documents(str(folder / "python"))
    lines = (folder / "python/prose.jsonl").read_text().splitlines()
    paragraphs = [part for line in lines for part in json.loads(line)["text"].split("\n\n")]
    texts: list[list[str]] = [[]]
    n_characters = 0
    for paragraph in paragraphs:
        texts[-1].append(paragraph)
        n_characters += len(paragraph)
        if n_characters >= DOCUMENT_CHARACTERS:
            texts.append([])
            n_characters = 0
    draw = random.Random(SEED)
    draw.shuffle(texts)
    long = [text for text in texts if len("\n\n".join(text)) >= DOCUMENT_CHARACTERS]
    passages = long[: sum(COPIES.values())]
    documents = [text for text in texts if text and text not in passages]
    free = [n for n in range(len(documents)) if split_of(str(n), seed=SEED, heldout_frac=HELDOUT_FRAC) == TRAIN]
    draw.shuffle(free)
    for copies, number in COPIES.items():
        for _ in range(number):
            passage = "\n\n".join(passages.pop())[:PASSAGE_CHARACTERS].rpartition(" ")[0]
            for _ in range(copies):
                document = documents[free.pop()]
                document.insert(draw.randint(0, len(document)), passage)
    rows = [{"id": str(n), "text": "\n\n".join(document)} for n, document in enumerate(documents)]
    (folder / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(folder: Path, name: str) -> dict[str, Any]:
    """Build a set and write its tokens, all with the tokenizer of the first; returns counts of its training split."""
    pages = {"path": "pages.jsonl", "name": "pages", "id_field": "id", "rules": ["none"]}
    same = {"heldout_frac": HELDOUT_FRAC, "seed": SEED, "pii": "keep", "clean": False, "workers": 1}
    recipe = {"name": name, "inputs": [pages], "output": f"data/{name}", **same, **SETS[name]}
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    smalti(folder, "data", "build", f"{name}.yaml")
    first = next(iter(SETS))
    tokenizer = ["tokenizer=train", "vocab_size=2048"] if name == first else [f"tokenizer=tokens/{first}/tokenizer"]
    tokens = {"documents": f"data/{name}", "output": f"tokens/{name}"}
    (folder / "tokenize.yaml").write_text(json.dumps(tokens))
    smalti(folder, "data", "tokenize", "tokenize.yaml", *tokenizer)
    manifest = json.loads((folder / f"tokens/{name}/pages/train/manifest.json").read_text())
    return {"documents": manifest["n_documents"], "tokens": manifest["n_tokens"]}


def train(folder: Path, name: str, steps: int) -> None:
    """Train a model of 1.2M parameters on a set, and export it."""
    recipe = {
        "name": name,
        "model": {
            "family": "llama",
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
        "data": {
            "tokenizer": "tokens/repeated/tokenizer",
            "sources": {"pages": f"tokens/{name}/pages/train"},
            "heldout": {"pages": "tokens/repeated/pages/heldout"},
            "seq_len": 256,
            "stages": [{"weights": {"pages": 1}}],
        },
        "train": {
            "duration": f"{steps}step",
            "global_batch_tokens": 2048,
            "optimizer": {"lr": 4e-3},
            "schedule": {"warmup": "0.1run", "decay": "0.3run"},
            "precision": {"compute": "fp32"},
            "checkpoint": {"every": "1run"},
            "eval_every": "1run",
            "parallel": {"ranks": 1, "threads": 1, "device": "cpu"},
        },
    }
    (folder / f"train-{name}.yaml").write_text(json.dumps(recipe))
    smalti(folder, "train", f"train-{name}.yaml")
    smalti(folder, "export", f"runs/{name}")


def measure(folder: Path, name: str, of: str, windows: int) -> dict[str, Any]:
    """Measure the model of set ``name`` on the training documents of set ``of``; returns the scores of the tasks."""
    paths = ["--train", f"tokens/{of}/pages/train", "--heldout", "tokens/repeated/pages/heldout"]
    output = ["--output", f"results/{name}-{of}"]
    smalti(folder, "eval", "memorised", f"runs/{name}", "--windows", str(windows), *paths, *output)
    (results,) = folder.glob(f"results/{name}-{of}/evals/memorised/*/results.json")
    tasks: dict[str, Any] = json.loads(results.read_text())["tasks"]
    return tasks


def show(model: str, of: str, tasks: dict[str, Any]) -> None:
    """Print a line for each task and group."""
    for task, score in tasks.items():
        parts = {"all": score, **(score["by_occurrences"] if task == "train" else {})}
        for group, part in parts.items():
            interval = "{:.3f} to {:.3f}".format(*part["interval"])
            name = f"{task} of {of}" if task == "train" else task
            print(
                f"{model:14}{name:24}{group:8}{part['n']:6,}{part['value']:8.3f}  {interval}"
                f"{part['matched_frac']['value']:8.3f}",
                flush=True,
            )


def main() -> None:
    """Print the shares of extractable windows; ``--record`` also writes bench/results/memorised.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--record", action=RecordOption, help="write bench/results/memorised.json")
    options = parser.parse_args()
    begin_s = time.perf_counter()
    figures: dict[str, Any] = {"steps": options.steps, "windows": options.windows, "sets": {}, "models": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        for of in SETS:
            figures["sets"][of] = build(folder, of)
            print(f"{of}: {figures['sets'][of]['documents']:,} documents, {figures['sets'][of]['tokens']:,} tokens")
        print("\nmodel of      windows of              copies       n   share  95 % interval  matched")
        for model in SETS:
            train(folder, model, options.steps)
            figures["models"][model] = {
                of: measure(folder, model, of, options.windows) for of in dict.fromkeys(("repeated", model))
            }
            for of, tasks in figures["models"][model].items():
                show(model, of, tasks)
    print(f"{time.perf_counter() - begin_s:.0f} s")
    if options.record:
        print("wrote", record("memorised", figures))


if __name__ == "__main__":
    main()
