"""A small run that tests start as a process, ``smalti train``: token files, recipe, command, losses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from network_nodes import environment

from smalti.data.tokens.writer import TokenWriter

RECIPE = """\
name: t
model:
  vocab_size: 512
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
data:
  sources: {a: tokens/a, b: tokens/b}
  seq_len: 32
  stages:
  - weights: {a: 1, b: 2}
train:
  duration: DURATION
  global_batch_tokens: 256
  optimizer: {lr: 1e-3}
  parallel: {device: cpu, threads: 1, join_timeout: 40s}
  checkpoint: {every: 10step}
"""


def write_recipe(work: Path, *, duration: str = "30step") -> None:
    """``r.yaml`` in ``work``, and the token files that it names."""
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        with TokenWriter(work / "tokens" / name, vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
            for _ in range(30):
                ids = rng.integers(1, 500, size=rng.integers(20, 200))
                writer.add(ids, 4 * ids.size)
    (work / "r.yaml").write_text(RECIPE.replace("DURATION", duration))


def train(work: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``smalti train ARGUMENTS`` in ``work``; ``more``: of the environment."""
    command = [sys.executable, "-m", "smalti", "train", *arguments]
    return subprocess.run(
        command, cwd=work, env=environment(more), capture_output=True, text=True, timeout=240, check=False
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, training loss) of a run, to the bit."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss/train/total"]) for line in lines if "loss/train/total" in line]
