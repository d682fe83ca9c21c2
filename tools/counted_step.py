"""Run training steps of a recipe on random tokens, counting every live storage.

Job, model, FSDP2, loss and optimizer are those of ``smalti train``; only the tokens are random. The process joins the
world that its environment describes. A temporary run folder is removed at the end.
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
"""Length of the synthetic documents if rows are packed; token 0 ends each."""


@dataclass(frozen=True)
class Counted:
    """Peak of one step on one rank."""

    peak_bytes: int
    phase: str
    phases: dict[str, int]
    """Phase -> its peak bytes."""
    parts: dict[str, int]
    """``weights``, ``moments``, ``gathered``, ``batch`` and all the ``rest`` at the peak."""


class _Stream:
    """Random tokens in the microbatches of the trainer's stream."""

    def __init__(self, config: RunConfig, data_ranks: int) -> None:
        batch, self.seq_len = config.batches_and_lengths[0]
        self.rows = -(-(batch // self.seq_len) // data_ranks)
        self.at_once = usual_microbatch(config, data_ranks) // self.seq_len
        self.vocab_size, self.packed = config.model.vocab_size, config.data.mask_documents

    def batch(self, step: int) -> list[Batch]:
        """Return one rank's microbatches."""
        random = np.random.default_rng(step)
        microbatches = []
        for first in range(0, self.rows, self.at_once):
            rows = min(self.at_once, self.rows - first)
            tokens = random.integers(1, self.vocab_size, (rows, self.seq_len + 1), dtype=np.int64)
            tokens[:, DOCUMENT_TOKENS::DOCUMENT_TOKENS] = 0
            narrow = tokens.astype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
            microbatches.append(Batch(narrow, np.zeros(rows, np.int16), 0, 0 if self.packed else None, self.packed))
        return microbatches


class _Batches(TokenBatches):
    def own_part(self, part: Callable[[Tensor], Tensor]) -> None:
        """Set the function that takes this rank's part of each row, for sequence parallelism."""
        self._own_part = part

    def check(self, state: dict[str, Any], step: int) -> None:
        """Accept any state: random tokens have none."""

    def state(self, step: int) -> dict[str, Any]:
        """Return an empty state."""
        return {}


class Step(NamedTuple):
    """Counts of one step."""

    live: LiveBytes
    collectives: list[Total]


@contextmanager
def _one_folder() -> Iterator[str]:
    """Yield a run folder that has the same name on all ranks, because ranks compare their configs."""
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
    """Run ``steps`` steps and return a count for each. The first allocates gradients and buffers for later ones.

    ``prepare``: called with the model before the first step.
    """
    with _one_folder() as folder:
        track = config.track.model_copy(update={"console": False, "system_every_s": 0})
        config = config.model_copy(update={"folder": folder, "track": track})
        stream: Any = _Stream(config, layout_of(config, env.world().world_size).data_ranks)
        batches = _Batches(stream, torch.device("cpu"), mask_documents=config.data.mask_documents)
        # MFU is not needed, so do not measure the matmul rate
        with patch.object(rank_setup, "peak_flops_per_s", return_value=None):
            job = jobs.build(config, batches=batches)
        batches.own_part(sequence.own_part(job.mesh, context=config.train.parallel.context))
        if prepare is not None:
            prepare(job.state.model)
        counts = []
        for step in range(steps):
            microbatches = batches.batch(step)
            with Traffic(job.mesh) as traffic:
                live = _count(job, microbatches)
            counts.append(Step(live, traffic.totals()))
        return counts


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
    """Return the figures of one count."""
    phase, peak, alive = live.peak()
    parts = dict.fromkeys(("weights", "moments", "gathered", "batch", "rest"), 0)
    for storage, size in alive.items():
        parts["gathered" if storage.is_resized else storage.kind or "rest"] += size
    return Counted(peak, phase, live.peaks(), parts)
