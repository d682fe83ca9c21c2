"""A real training step of a recipe over made-up tokens, with every live storage counted.

Promises: job, model, FSDP2, loss and optimizer are those of ``smalti train``; only the tokens are drawn. Nothing is
saved beyond a run folder in a temporary place. The process joins the world that its environment describes.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from smalti.base import env
from smalti.config.run import RunConfig
from smalti.cost.axes import layout_of
from smalti.cost.batch import usual_microbatch
from smalti.data.stream.batch import Batch
from smalti.distributed.parallel import sequence
from smalti.distributed.trace.live_bytes import LiveBytes
from smalti.distributed.trace.traffic import Total, Traffic
from smalti.train import job as jobs
from smalti.train import rank_setup
from smalti.train.batches import Microbatch, TokenBatches
from smalti.train.step import train_step

DOCUMENT_TOKENS = 100
"""Length of the made-up documents where rows are packed; 0 ends each."""


@dataclass(frozen=True)
class Counted:
    """The fullest moment of one step on one rank."""

    peak_bytes: int
    phase: str
    phases: dict[str, int]
    """Phase -> its most bytes."""
    parts: dict[str, int]
    """``weights``, ``moments``, ``gathered``, ``batch`` and all the ``rest`` at the peak."""


class _Stream:
    """Tokens of a seed, cut as the trainer's stream cuts them."""

    def __init__(self, config: RunConfig, data_ranks: int) -> None:
        batch, self.seq_len = config.batches_and_lengths[0]
        self.rows = -(-(batch // self.seq_len) // data_ranks)
        self.at_once = usual_microbatch(config, data_ranks) // self.seq_len
        self.vocab_size, self.packed = config.model.vocab_size, config.data.mask_documents

    def batch(self, step: int) -> list[Batch]:
        """One rank's microbatches."""
        random, found = np.random.default_rng(step), []
        for first in range(0, self.rows, self.at_once):
            rows = min(self.at_once, self.rows - first)
            tokens = random.integers(1, self.vocab_size, (rows, self.seq_len + 1), dtype=np.int64)
            tokens[:, DOCUMENT_TOKENS::DOCUMENT_TOKENS] = 0
            narrow = tokens.astype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
            found.append(Batch(narrow, np.zeros(rows, np.int16), 0, 0 if self.packed else None, self.packed))
        return found


class _Batches(TokenBatches):
    def own_part(self, part: Callable[[Tensor], Tensor]) -> None:
        """Of each row, where ranks share it."""
        self._own_part = part

    def check(self, state: dict[str, Any], step: int) -> None:
        """There is nothing to compare."""

    def state(self, step: int) -> dict[str, Any]:
        """Nothing to keep."""
        return {}


class Step(NamedTuple):
    """What was counted in one step."""

    live: LiveBytes
    collectives: list[Total]


@contextmanager
def _one_folder() -> Iterator[str]:
    """A run folder of these ranks: ranks compare their configs when they meet, so it has one name on all of them."""
    world = env.world()
    name = os.getppid() if world.world_size > 1 else os.getpid()  # ranks have one parent
    folder = os.path.join(tempfile.gettempdir(), f"counted-{name}")
    try:
        yield folder
    finally:
        if world.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def counted_steps(
    config: RunConfig, steps: int = 2, *, prepare: Callable[[nn.Module], None] | None = None
) -> list[Step]:
    """Take ``steps`` steps; one count for each. The first makes gradients and buffers that later ones find.

    prepare: is given the model before the first.
    """
    with _one_folder() as folder:
        track = config.track.model_copy(update={"console": False, "system_every_s": 0})
        config = config.model_copy(update={"folder": folder, "track": track})
        stream: Any = _Stream(config, layout_of(config, env.world().world_size).data_ranks)
        batches = _Batches(stream, torch.device("cpu"), mask_documents=config.data.mask_documents)
        # no MFU is asked for, so no matmul rate is measured
        with patch.object(rank_setup, "peak_flops_per_s", return_value=None):
            job = jobs.build(config, batches=batches)
        batches.own_part(sequence.own_part(job.mesh, context=config.train.parallel.context))
        if prepare is not None:
            prepare(job.state.model)
        found = []
        for step in range(steps):
            microbatches = batches.batch(step)
            with Traffic(job.mesh) as traffic:
                live = _count(job, microbatches)
            found.append(Step(live, traffic.totals()))
        return found


def _count(job: Any, microbatches: Sequence[Microbatch]) -> LiveBytes:
    live, state, update = LiveBytes(), job.state, job.state.optimizer.step

    def loss(model: Any, microbatch: Microbatch) -> Any:
        live.in_phase = "forward"
        result = job.loss(model, microbatch)
        live.in_phase = "backward"
        return result

    def step() -> None:
        live.in_phase = "optimizer"
        update()

    with live:
        for parameter in state.model.parameters():
            live.name(parameter, "weights")
            for value in state.optimizer.state[parameter].values():
                live.name(value, "moments")
        for tensor in (tensor for microbatch in microbatches for tensor in microbatch if isinstance(tensor, Tensor)):
            live.name(tensor, "batch")
        live.in_phase = "begin"
        state.optimizer.step = step
        try:
            train_step(state, microbatches, loss)
        finally:
            state.optimizer.step = update
    return live


def counted(live: LiveBytes) -> Counted:
    """The figures of one count."""
    phase, peak, alive = live.peak()
    parts = dict.fromkeys(("weights", "moments", "gathered", "batch", "rest"), 0)
    for storage, size in alive.items():
        parts["gathered" if storage.is_resized else storage.kind or "rest"] += size
    return Counted(peak, phase, live.peaks(), parts)
