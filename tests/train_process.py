"""A small run that tests start as a process, ``smalti train``: token files, recipe, command, losses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from forked_command import start
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
  heldout: {h: tokens/h}
  seq_len: 32
  stages:
  - until: 0.8run
    weights: {a: 1, b: 2}
  - weights: {b: 1}
train:
  duration: 40step
  global_batch_tokens: 256
  optimizer: {lr: 1e-3}
  parallel: {ranks: 2, device: cpu, threads: 1, join_timeout: 40s}
  checkpoint: {every: 10step}
  eval_every: 1run
"""


def write_tokens(folder: Path, seed: int, *, tokenizer: str = "ab" * 32, vocab_size: int = 512) -> None:
    """Write 30 random documents."""
    rng = np.random.default_rng(seed)
    with TokenWriter(folder, vocab_size=vocab_size, eod_id=0, tokenizer_digest=tokenizer) as writer:
        for _ in range(30):
            ids = rng.integers(1, 500, size=rng.integers(20, 200))
            writer.add(ids, 4 * ids.size)


def write_recipe(work: Path, text: str = RECIPE) -> None:
    """Write ``r.yaml`` into ``work``, and the token files that ``RECIPE`` names."""
    for seed, name in enumerate("abh"):
        write_tokens(work / "tokens" / name, seed)
    (work / "r.yaml").write_text(text)


def one_rank(duration: str = "30step") -> str:
    """Return ``RECIPE`` for one rank."""
    return RECIPE.replace("ranks: 2", "ranks: 1").replace("40step", duration)


def train(
    work: Path,
    *arguments: str,
    under: tuple[str, ...] = (),
    preexec_fn: Callable[[], None] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``smalti train ARGUMENTS`` in ``work``, with these environment variables; ``under``: options of Python.

    Without the last two it is a forked command, with all of its output as stderr.
    """
    if not under and preexec_fn is None:
        code, output = start("train", *arguments, folder=work, environment=environment(variables)).finish(240)
        return subprocess.CompletedProcess(arguments, code, "", output)
    command = [sys.executable, *under, "-m", "smalti", "train", *arguments]
    return subprocess.run(
        command, cwd=work, env=environment(variables), capture_output=True, text=True, timeout=240, check=False,
        preexec_fn=preexec_fn,
    )  # fmt: skip


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return (step, training loss) of a run, to the bit."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss/train/total"]) for line in lines if "loss/train/total" in line]
