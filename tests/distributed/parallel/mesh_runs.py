"""One small run on any mesh, against one process: losses, gradient norms, and the router's choices kept or forced.

The run is built by ``train.job.build`` like any other: packed documents, token files, a whole step. Choices are kept by
step and layer for all rows of the batch, and each rank looks up those of its own rows and tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gloo_ranks import run_ranks
from torch import Tensor, nn

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.tokens.writer import TokenWriter
from smalti.distributed.checkpoint import saver
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import sequence
from smalti.model.blocks.moe.router import Router
from smalti.train import build
from smalti.train.loop import Job
from smalti.train.saving import checkpoint_metadata
from smalti.train.step import train_step

VOCAB, SEQ_LEN, ROWS = 96, 64, 8
EPS = 1e-6
"""AdamW's. With 1e-8 an element whose first gradient is 8e-9 moves by what rounding left of it: one process with
microbatches of 64 tokens is then 1.6e-5 of a gradient norm away from one with 512, by no mesh at all; with 1e-6, 5e-7.
"""
DENSE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MOE = {**DENSE, "family": "dbrx", "norm": "layernorm", "intermediate_size": 32}
MOE["moe"] = {"num_experts": 8, "num_experts_per_tok": 2, "balance_loss_coef": 0.01, "z_loss_coef": 0.001}
MOE["moe"] |= {"router_lr_frac": 0.5}
MODELS = {"dense": DENSE, "moe": MOE}


class Choice(NamedTuple):
    """A router's choice that is not that of one process."""

    step: int
    layer: int


class Run(NamedTuple):
    """Losses, norms and choices of a run."""

    loss: list[float]
    grad_norm: list[float]
    choices: dict[tuple[int, int], Tensor]
    """(step, layer) -> [rows, T, k], of one process only."""
    differs: Choice | None
    """The first choice that this rank would have made otherwise."""


def write_tokens(folder: Path, documents: int = 150, seed: int = 0) -> None:
    """Arithmetic progressions in documents of 5 to 90 tokens."""
    generator = np.random.default_rng(seed)
    with TokenWriter(folder, vocab_size=VOCAB, eod_id=0, tokenizer_digest="a" * 64) as writer:
        for _ in range(documents):
            length, first = int(generator.integers(5, 90)), int(generator.integers(1, VOCAB))
            writer.add((np.arange(length) * 3 + first) % (VOCAB - 1) + 1, n_text_bytes=length * 3)


def config_of(root: Path, kind: str, name: str, steps: int, ranks: int = 1, **parallel: Any) -> RunConfig:
    """``parallel``: the axes, and ``microbatch_tokens``."""
    for seed, source in enumerate(("made", "more")):
        if not (root / "tokens" / source).exists():
            write_tokens(root / "tokens" / source, seed=seed)
    train: dict[str, Any] = {
        "duration": f"{steps}step",
        "global_batch_tokens": ROWS * SEQ_LEN,
        "optimizer": {"lr": 3e-3, "eps": EPS},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every": "1run"},
        "microbatch_tokens": parallel.pop("microbatch_tokens", "auto"),
        "parallel": {"ranks": ranks, "threads": 1, "device": "cpu", **parallel},
    }
    begin = {"until": "0.5run", "weights": {"made": 1, "more": 1}}
    tree = {
        "name": name,
        "folder": str(root / "runs" / name),
        "model": MODELS[kind],
        "data": {
            "sources": {source: str(root / "tokens" / source) for source in ("made", "more")},
            "stages": [*([begin] if steps > 1 else []), {"weights": {"made": 1, "more": 7}}],
            "seq_len": SEQ_LEN, "mask_documents": True,
        },
        "train": train,
        "track": {"console": False},
    }  # fmt: skip
    return from_dict(RunConfig, tree, "mesh").config


def run_on(
    ranks: int,
    config: RunConfig,
    steps: int,
    reference: "Run | None" = None,
    *,
    replay: bool = False,
    save_to: Path | None = None,
) -> Run:
    """Train to step ``steps``, from the run's checkpoint if it has one; rank 0's figures.

    ``reference``: of one process; ``replay``: its choices are forced; ``save_to``: a checkpoint is saved there at the
    end.
    """
    folder = Path(config.run_folder).parent
    if reference is not None:
        torch.save(reference.choices, folder / "choices.pt")
    known = None if reference is None else str(folder / "choices.pt")
    results: list[Run] = run_ranks(ranks, _train, config, steps, known, replay, save_to, timeout_s=300)
    differs = min((run.differs for run in results if run.differs is not None), default=None)
    for run in results[1:]:
        assert run.loss == results[0].loss, "ranks disagree about the loss"
    return results[0]._replace(differs=differs)


def _train(
    rank: int, config: RunConfig, steps: int, known: str | None, replay: bool, save_to: Path | None = None
) -> Run:
    job = build(config)
    choices: dict[tuple[int, int], Tensor] = {} if known is None else torch.load(known)
    differs: list[Choice] = []
    losses, norms = list[float](), list[float]()
    for step in range(job.state.step, steps):
        microbatches = job.batches.batch(step)
        with _routers(job, step, choices, taken=known is None, replay=replay, differs=differs):
            result = train_step(job.state, microbatches, job.loss)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    if save_to is not None:
        saver.save(save_to, steps, job.tensors(), checkpoint_metadata(job), keep=2)
    return Run(losses, norms, choices if known is None else {}, min(differs, default=None))


@contextmanager
def _routers(
    job: Job, step: int, choices: dict[tuple[int, int], Tensor], *, taken: bool, replay: bool, differs: list[Choice]
) -> Iterator[None]:
    """Inside, each router's choices are taken down, or compared with those known and, with ``replay``, replaced."""
    routers = [
        (int(name.split("blocks.")[1].split(".")[0]), module)
        for name, module in job.state.model.named_modules()
        if isinstance(module, Router)
    ]
    for layer, router in routers:
        router.chooser = _Chooser(job, router, step, layer, choices, taken, replay, differs)
    try:
        yield
    finally:
        for _, router in routers:
            router.chooser = None


class _Chooser:
    """Replaces ``Router.choose`` of one layer for one step; called once per microbatch, in order."""

    def __init__(
        self, job: Job, router: nn.Module, step: int, layer: int, choices: dict[tuple[int, int], Tensor],
        taken: bool, replay: bool, differs: list[Choice],
    ) -> None:  # fmt: skip
        self.choose, self.at, self.choices = router.choose, (step, layer), choices
        self.taken, self.replay, self.differs = taken, replay, differs
        self.mesh: Mesh = job.mesh
        self.context = job.config.train.parallel.context
        self.row = ROWS * self.mesh.data_rank // self.mesh.layout.data_ranks

    def __call__(self, score_BTE: Tensor) -> Tensor:
        own_BTk: Tensor = self.choose(score_BTE)
        if self.taken:
            before = self.choices.get(self.at)
            self.choices[self.at] = own_BTk if before is None else torch.cat([before, own_BTk])
            return own_BTk
        wanted_BTk = self._wanted(own_BTk)
        if not torch.equal(wanted_BTk, own_BTk):
            self.differs.append(Choice(*self.at))
        return wanted_BTk if self.replay else own_BTk

    def _wanted(self, own_BTk: Tensor) -> Tensor:
        rows, last = own_BTk.shape[0], ROWS * (self.mesh.data_rank + 1) // self.mesh.layout.data_ranks
        whole_RTk = self.choices[self.at][self.row : min(self.row + rows, last)]
        self.row += rows
        part = sequence.own_part(self.mesh, context=self.context)
        mine_RTk = torch.stack([part(one_RT) for one_RT in whole_RTk.unbind(-1)], dim=-1)
        if own_BTk.shape[1] != mine_RTk.shape[1]:  # tokens shared by the tensor ranks, in slices
            mine_RTk = mine_RTk.chunk(self.mesh.layout.tensor, dim=1)[self.mesh.place("tensor")]
        filled = own_BTk.shape[0] - mine_RTk.shape[0]  # rows that fill up a microbatch and count for nothing
        return torch.cat([mine_RTk, own_BTk[own_BTk.shape[0] - filled :]]) if filled else mine_RTk
