"""Runs of the demo's recipes for benchmarks, on the data of ``smalti demo``; finished runs are not repeated."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from record import ROOT, commit_of

SOURCES = ("code", "prose")


def smalti(folder: Path, *arguments: str) -> None:
    """Run a command in ``folder`` on one thread. Raises RuntimeError with the end of its output if it fails."""
    command = [sys.executable, "-m", "smalti", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"smalti {' '.join(arguments)} ended with {done.returncode}:\n{text}")


def prepared(parent: Path) -> Path:
    """Return the folder of this code below ``parent``, with the token files of the demo, made by its commands."""
    folder = parent / _code_key()
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "data/finished"
    if not finished.exists():
        shutil.rmtree(folder / "data", ignore_errors=True)
        smalti(folder, "data", "documents", "data/demo/raw")
        for stage, recipe in (("curate", "demo-curate"), ("dedup", "demo-dedup"), ("tokenize", "demo-tokenize")):
            smalti(folder, "data", stage, recipe)
        finished.touch()
    return folder


def train(folder: Path, recipe: str, seed: int, steps: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Train a recipe on one rank and one thread, unless it is finished; return its metrics."""
    key = sha256(" ".join((recipe, str(steps), *overrides)).encode()).hexdigest()[:12]
    run = f"runs/{key}-{seed}"
    status = folder / run / "status.json"
    if not status.exists() or json.loads(status.read_text())["state"] != "done":
        smalti(
            folder, "train", recipe, f"name={seed}", f"folder={run}", f"seed={seed}", f"train.duration={steps}step",
            "train.parallel.ranks=1", "train.parallel.threads=1", "train.parallel.device=cpu", "train.log_every=1step",
            "train.eval_every=1run", *overrides,
        )  # fmt: skip
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def bits_per_byte(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last held-out bits per byte of each source."""
    keys = {source: f"metrics/eval/{source}/bits_per_byte" for source in SOURCES}
    last = next(row for row in reversed(rows) if keys["code"] in row)
    return {source: last[key] for source, key in keys.items()}


def _code_key() -> str:
    """Return a digest of the commit and of what was changed since."""
    changes = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=False).stdout
    return sha256(commit_of(ROOT).encode() + changes).hexdigest()[:12]
