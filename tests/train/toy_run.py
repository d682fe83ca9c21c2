"""A toy data set and run config for tests of training: tokens that a small model learns within seconds."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.tokens.writer import TokenWriter

VOCAB = 256
DIGEST = "a" * 64


def write_tokens(folder: Path, *, n_documents: int = 120, seed: int = 0, digest: str = DIGEST) -> None:
    """Token files of arithmetic progressions, which a small model learns in a few steps."""
    generator = np.random.default_rng(seed)
    with TokenWriter(folder, vocab_size=VOCAB, eod_id=0, tokenizer_digest=digest) as writer:
        for _ in range(n_documents):
            length, first = int(generator.integers(20, 200)), int(generator.integers(1, VOCAB))
            writer.add((np.arange(length) * 3 + first) % (VOCAB - 1) + 1, n_text_bytes=length * 3)


def config(root: Path, kind: str = "dense", **train: Any) -> RunConfig:
    """A run over two sources and two stages below ``root`` (whose tokens are written where they are missing)."""
    for number, name in enumerate(("code", "prose")):
        if not (root / "tokens" / name).exists():
            write_tokens(root / "tokens" / name, seed=number)
    model: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    if kind == "moe":
        model |= {"family": "dbrx", "norm": "layernorm", "intermediate_size": 32}
        model |= {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}
    tree = {
        "name": kind,
        "folder": str(root / "runs" / kind),
        "model": model,
        "data": {
            "sources": {name: str(root / "tokens" / name) for name in ("code", "prose")},
            "seq_len": 32,
            "stages": [
                {"until": "0.5run", "weights": {"code": 1, "prose": 1}},
                {"weights": {"code": 3, "prose": 1}},
            ],
        },
        "train": {
            "duration": "24step",
            "global_batch_tokens": 384,
            "optimizer": {"lr": 3e-3},
            "precision": {"compute": "fp32"},
            "checkpoint": {"every": "5step"},
            "parallel": {"threads": 1},
            **train,
        },
        "track": {"console": False},
    }
    return from_dict(RunConfig, tree, "toy").config


def fit_until(rank: int, config: RunConfig, step: int) -> None:
    """Train until SIGTERM stops the run after ``step``."""
    from smalti.train import Hook, build, fit
    from smalti.train.loop import Job
    from smalti.train.step import StepResult

    class Terminate(Hook):
        def on_step(self, job: Job, result: StepResult) -> None:
            if job.state.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Exception, match="stopped"):
        fit(build(config, hooks=[Terminate()]))
