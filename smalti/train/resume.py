"""Resumes a run: the rules for changes between attempts, and the loading of its checkpoint.

- Config: placement may change, identity only by a fork (``config/identity.py``, ``track/run.py``,
  ``data/stream/fork.py``).
- Checkpoint: the newest that verifies; a run that has lost all of its own raises UserError (``track/run.py``).
- Data: the schedule must be that of the checkpoint (``data/stream/state.py``).
- Microbatch: half of one that ran out of memory on this placement (``track/out_of_memory.py``).
- ``init_from``: loaded only without a checkpoint (``train/origin.py``).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smalti.base import env, log
from smalti.base.env import World
from smalti.config.run import JobConfig, RunConfig
from smalti.data.stream.fork import plan_fork
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import world as worlds
from smalti.track.checkpoints import manifest, retention
from smalti.track.out_of_memory import limit_tokens
from smalti.track.run import RunFolder
from smalti.train.batches import Batches
from smalti.train.step import TrainState


def open_folder(
    config: JobConfig,
    world: World,
    origins: Mapping[str, str],
    *,
    fork: bool,
    opened: Callable[[RunFolder], None],
) -> tuple[RunFolder, JobConfig]:
    """Join the attempt that the agent opened; under another launcher rank 0 opens it. A collective.

    Returns the folder, and the config with the history of its forks. Raises UserError where the config is not allowed
    in the folder (``RunFolder.open``).
    """
    locked: list[RunFolder] = []  # on rank 0 the folder with the lock of the run

    def open_on_rank0() -> int | None:
        planned = plan_fork(config) if fork and isinstance(config, RunConfig) else None
        locked.append(RunFolder.open(config, origins, fork=planned))
        return locked[0].attempt

    attempt = world.attempt if env.attempt_is_open() else worlds.broadcast_from_rank0(open_on_rank0)
    folder = locked[0] if locked else RunFolder.join(config.run_folder, attempt or 0)
    opened(folder)
    return folder, worlds.broadcast_from_rank0(lambda: folder.with_history(config))


def find_checkpoint(folder: RunFolder, events: Any) -> str | None:
    """Return the newest checkpoint that verifies, the same on every rank; each rank verifies a part. A collective.

    Newer ones that do not verify are skipped with a warning and an event, and renamed.
    """
    warn = log.get("train").warning if dist.get_rank() == 0 else log.get("train").debug

    def reject(path: str, reason: str) -> None:
        warn("%s is skipped: %s", path, reason)
        events.write("checkpoint_rejected", path=path, reason=reason)

    missing = worlds.broadcast_from_rank0(folder.missing_checkpoint)
    if missing is not None:
        reject(missing, "it is missing, or not complete")
    path = checkpoint.newest(folder.checkpoints, reject, shared=True)
    if path is not None:
        for aside in worlds.broadcast_from_rank0(lambda: retention.set_aside_newer(path)):
            warn("it is renamed to %s", aside)
    return path


def load_checkpoint(
    path: str | None, state: TrainState, tensors: Mapping[str, Tensor], batches: Batches, events: Any
) -> dict[str, Any]:
    """Load a checkpoint into ``tensors`` and ``state.step``; returns its ``train_state``, empty without a checkpoint.

    Raises UserError if the data or its order is not that of the checkpoint. A collective.
    """
    if path is None:
        return {}
    saved = worlds.broadcast_from_rank0(lambda: manifest.read_state(path))
    batches.check(saved["stream"], saved["step"])
    checkpoint.load(path, dict(tensors))
    state.step = saved["step"]
    log.get("train").info("resumed from %s", path)
    events.write("resumed", step=state.step, path=path)
    return saved


def microbatch_limit(folder: RunFolder, placement: Mapping[str, Any]) -> int | None:
    """Return the largest microbatch after attempts that ran out of memory on this placement; None without any."""
    return worlds.broadcast_from_rank0(lambda: limit_tokens(folder.events(), placement))
