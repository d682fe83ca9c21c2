"""Settings of the study of experts: kinds of models, lengths, learning rates, and the config of each run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.flops import train_flops_per_token

MOE: dict[str, Any] = {
    "score": "softmax",
    "norm_topk_prob": True,
    "balance_loss_coef": 0.3,
    "global_balance_loss_coef": 0.0,
    "bias_update_rate": 0.0,
    "z_loss_coef": 1e-3,
    "router_initializer_range": 0.1,
    "router_lr_frac": 0.1,
}
"""Fields of ``model.moe`` of every MoE, other than its experts: those of the recipe demo-moe. A single chosen expert is
never normalised."""
SHARES = {"code": 0.75, "prose": 0.25}
"""Shares of the sources in the training data, and their weights in held-out bits per byte."""


@dataclass(frozen=True)
class Experts:
    """The experts of a kind; each is as wide as the dense MLP divided by ``active``."""

    num: int
    """Experts that the router chooses from."""
    per_token: int
    """Experts that it chooses for a token."""
    shared: int = 0
    """Experts that every token uses besides."""

    @property
    def active(self) -> int:
        """Experts that a token uses."""
        return self.per_token + self.shared


KINDS: dict[str, Experts | None] = {
    "dense": None,
    "1 of 8": Experts(8, 1),
    "2 of 8": Experts(8, 2),
    "4 of 16": Experts(16, 4),
    "8 of 32": Experts(32, 8),
    "4 of 16 + 1 shared": Experts(16, 4, shared=1),
}
DECIDING = ("dense", "4 of 16")
"""The kinds that are trained to the last length."""


@dataclass(frozen=True)
class Length:
    """A length of training, and which runs it has."""

    steps: int
    """Steps of the dense model; the others get as many as its FLOPs allow."""
    evaluations: int
    """Held-out measurements during a run."""
    rates: int | None
    """Number of learning rates that each kind tries, the best of the length before; None: the whole grid."""
    extensions: int
    """Number of rates that may be added, a factor of 2 each, where the best is the lowest or highest."""
    kinds: tuple[str, ...] = tuple(KINDS)
    min_seeds: int = 1
    """Seeds of the best rate, where the study has fewer."""
    checkpoints: int = 1
    """The newest checkpoints that a run of it keeps, of the ten that it saves."""

    def grid(self, kind: str, lr: float, seeds: int) -> "list[Run]":
        """Return the runs that judge a rate."""
        return [Run(kind, self.steps, lr, seed) for seed in range(seeds)]


@dataclass(frozen=True)
class Size:
    """Settings that all runs share."""

    hidden: int = 128
    layers: int = 3
    intermediate: int = 640
    """Width of the dense MLP; divisible by the number of active experts of each kind."""
    vocab: int = 2048
    seq_len: int = 256
    batch_tokens: int = 4096
    eval_tokens: int = 65_536
    """Held-out tokens of each source."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    lengths: tuple[Length, ...] = (
        Length(256, evaluations=2, rates=None, extensions=2),
        Length(1024, evaluations=4, rates=2, extensions=1),
        Length(4096, evaluations=16, rates=1, extensions=0, kinds=DECIDING, min_seeds=6, checkpoints=10),
    )
    measured_steps: int = 32
    """Steps of the runs that measure speed."""
    debian: bool = True
    """Data: Debian's packages, or the documents of the installed Python."""
    thin: int = 1
    """Only every n-th document of the installed Python is used."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest run."""
        return self.lengths[-1].steps * self.batch_tokens


QUICK = Size(
    hidden=32, layers=2, intermediate=160, vocab=512, seq_len=64, batch_tokens=1024, eval_tokens=4096, rates=(4e-3,),
    lengths=(Length(4, 1, None, 0), Length(12, 4, 1, 0, DECIDING)), measured_steps=4,
    debian=False, thin=12,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run of the study."""

    kind: str
    steps: int
    """Steps of the dense model at this length."""
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """A name for its folder."""
        return f"{self.kind.replace(' + ', '-').replace(' ', '-')}-{self.steps}-lr{self.lr:g}-{self.seed}"


@dataclass(frozen=True)
class Place:
    """Folders and device of the runs; they change a result by rounding only."""

    folder: Path
    """Folder of the run folders."""
    tokens: Path
    device: str = "cpu"


def config_of(place: Place, size: Size, run: Run) -> RunConfig:
    """Return the config of a run with as many steps as the dense model's FLOPs allow."""
    dense, flops = (
        train_flops_per_token(ModelConfig.model_validate(model_of(size, kind)), size.seq_len)
        for kind in ("dense", run.kind)
    )
    return _config(place, size, run, run.steps * dense // flops)


def model_of(size: Size, kind: str) -> dict[str, Any]:
    """Return the section ``model`` of a kind."""
    experts = KINDS[kind]
    model: dict[str, Any] = {
        "family": "decoder",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate // (experts.active if experts else 1),
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 32,
        "max_position_embeddings": size.seq_len,
    }
    if experts:
        numbers = {"num_experts": experts.num, "num_experts_per_tok": experts.per_token}
        single = {"norm_topk_prob": False} if experts.per_token == 1 else {}
        model["moe"] = MOE | single | numbers | {"num_shared_experts": experts.shared}
    return model


def evaluations_of(size: Size, steps: int) -> int:
    """Return the number of held-out measurements of a run of that length."""
    return next((length.evaluations for length in size.lengths if length.steps == steps), 1)


def checkpoints_of(size: Size, steps: int) -> int:
    """Return the number of checkpoints that a run of that length keeps."""
    return next((length.checkpoints for length in size.lengths if length.steps == steps), 1)


def _config(place: Place, size: Size, run: Run, steps: int) -> RunConfig:
    values = {
        "name": run.name,
        "folder": str(place.folder / run.name),
        "seed": run.seed,
        "model": model_of(size, run.kind),
        "data": {
            "tokenizer": str(place.tokens / "tokenizer"),
            "sources": {name: str(place.tokens / name / "train") for name in SHARES},
            "heldout": {name: str(place.tokens / name / "heldout") for name in SHARES},
            "seq_len": size.seq_len,
            "stages": [{"weights": SHARES}],
        },
        "train": {
            "duration": f"{steps}step",
            "global_batch_tokens": size.batch_tokens,
            "optimizer": {"lr": run.lr},
            "schedule": {"warmup": "0.1run", "decay": "0.4run"},
            "precision": {"compute": "fp32"},  # as fast as bf16 on processors without AMX, and alike on all
            "parallel": {"device": place.device, "threads": 1, "compile": False},
            "checkpoint": {"every": "0.1run", "keep": checkpoints_of(size, run.steps)},
            "eval_every": f"{math.ceil(steps / evaluations_of(size, run.steps))}step",
            "eval_tokens": size.eval_tokens,
        },
        "track": {"console": False},
    }
    return from_dict(RunConfig, values, "experts").config
