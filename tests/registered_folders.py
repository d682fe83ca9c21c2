"""Folders as ``smalti export`` and training leave them, of a few bytes: the registry opens no weights."""

import json
from pathlib import Path
from typing import Any

from smalti.base.hashing import sha256_file

STREAM = {"data": "d1", "past": "p1", "tokenizer": "t1", "sources": {"code": "c1"}}
CONFIG = """\
name: demo
data: {sources: {code: {path: data/code}}}
train: {duration: 100step, global_batch_tokens: 64}
"""


def write_export(
    folder: Path, *, step: int = 20, weights: bytes = b"w" * 9000, run: Path | None = None, **more: Any
) -> Path:
    """An exported model; ``run``: of this run folder. ``more``: further fields of its record."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    record: dict[str, Any] = {"run": "demo", "step": step, "run_folder": str(run), **more} if run else {}
    if record:
        (folder / "export.json").write_text(json.dumps(record))
    return folder


def write_run(folder: Path, *, step: int = 20) -> Path:
    """A run folder with a checkpoint, the scores of two evaluations, and an export."""
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (checkpoint / "train_state.json").write_text(json.dumps({"step": step, "tokens": 64.0 * step, "stream": STREAM}))
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "COMPLETE").write_text(sha256_file(checkpoint / "manifest.json") + "\n")
    write_results(folder / "evals/demo/2026-01-01", step=step, value=0.5)
    write_results(folder / "evals/demo/2026-01-02", step=step - 1, value=0.9)
    write_export(folder / "export", step=step, run=folder)
    return folder


def write_results(folder: Path, *, step: int, value: float, n: int = 100) -> dict[str, Any]:
    """Results of a suite with one task."""
    score = {"metric": "accuracy", "value": value, "interval": [value - 0.1, value + 0.1], "n": n, "verdict": "x"}
    results = {"suite": "demo", "step": step, "time": folder.name, "tasks": {"sums": score}}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    return results
