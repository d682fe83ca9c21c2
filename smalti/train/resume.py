"""Resumes a run: the rules for changes between attempts, and the loading of its checkpoint.

- Config: placement may change, identity only by a fork (``config/identity.py``, ``track/run.py``,
  ``data/stream/fork.py``).
- Checkpoint: the newest that verifies, in the run folder, in shared memory or a store; a run that has lost all of its
  own raises UserError (``track/run.py``).
- Data: the schedule must be that of the checkpoint (``data/stream/state.py``).
- Microbatch: half of one that ran out of memory on this placement (``track/out_of_memory.py``).
- ``init_from``: loaded only without a checkpoint (``train/origin.py``).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smalti.base import env, log
from smalti.base.env import World
from smalti.base.errors import RetryableError
from smalti.config.run import JobConfig, RunConfig
from smalti.data.stream.fork import plan_fork
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import world as worlds
from smalti.track.checkpoints import manifest, retention
from smalti.track.checkpoints.names import PEER_MEMORY, NoneUsable, step_of
from smalti.track.out_of_memory import limit_tokens
from smalti.track.run import RunFolder
from smalti.train import frozen_origins
from smalti.train.batches import Batches
from smalti.train.checkpoint_copies import StoredCheckpoints
from smalti.train.frozen_origins import Identities
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


class Checkpoints:
    """The checkpoints that a run can resume from: finds the newest, and loads it or the one before. All ranks together.

    Those that do not verify are skipped with a warning and an event, and renamed once another one is loaded; copies in
    ``memory`` are deleted. stored: the copies in a store, which are searched for one that is newer than those left.
    """

    def __init__(
        self, folder: RunFolder, events: Any, memory: Path | None = None, stored: StoredCheckpoints | None = None
    ) -> None:
        self._folder, self._memory, self._stored = folder, memory, stored
        self._events = events
        self._warn = log.get("train").warning if dist.get_rank() == 0 else log.get("train").debug
        self._rejected: dict[str, str] = {}

    def find(self) -> str | None:
        """Return the newest checkpoint, the same on every rank; the bytes of its shards are verified by ``load``."""
        missing = worlds.broadcast_from_rank0(self._folder.missing_checkpoint)
        if missing is not None:
            self._reject(missing, "it is missing, or not complete")
        return self._newest()

    def load(
        self,
        path: str | None,
        state: TrainState,
        tensors: Mapping[str, Tensor],
        batches: Batches,
        frozen: Identities,
    ) -> dict[str, Any]:
        """Load the checkpoint of ``find`` into ``tensors`` and ``state.step``; returns its ``train_state``.

        Where a shard is damaged, everything is loaded again from the newest older one that is not. Empty without a
        checkpoint. Raises UserError if the data or its order is not that of the checkpoint, or it was trained beside
        other ``frozen`` weights; RetryableError where a copy in memory was damaged and there is no checkpoint.
        """
        first = path
        while path is not None:
            tried = path
            saved: dict[str, Any] = worlds.broadcast_from_rank0(lambda: manifest.read_state(tried))  # noqa: B023
            reason = worlds.broadcast_from_rank0(partial(self._of_another_run, saved))
            if reason is None:
                batches.check(saved["stream"], saved["step"])
                frozen_origins.require_saved(saved, path, frozen)
                reason = checkpoint.load_verified(path, dict(tensors))
            if reason is None:
                self._set_aside_newer(path)
                state.step = saved["step"]
                self._report(path, state.step)
                return saved
            self._rejected[path] = reason
            self._reject(path, reason)
            path = self._newest()
        if first is not None:
            raise RetryableError(
                f"the copy in memory was damaged, and {self._folder.checkpoints} has no checkpoint",
                hint="the next attempt starts from the beginning",
            ) from worlds.RaisedOnAllRanks("all ranks have the same checkpoints")
        return {}

    def _of_another_run(self, saved: Mapping[str, Any]) -> str | None:
        config = self._folder.path / "config.yaml"
        return manifest.of_another_run(saved, config.read_text(encoding="utf-8"), str(config))

    def _report(self, path: str, step: int) -> None:
        in_memory = Path(path).parent == self._memory
        log.get("train").info("recovered from peer memory: %s" if in_memory else "resumed from %s", path)
        self._events.write("resumed", step=step, path=path, **({"source": PEER_MEMORY} if in_memory else {}))

    def _newest(self) -> str | None:
        path, failure = None, None
        try:
            path = checkpoint.newest(
                self._folder.checkpoints,
                self._reject,
                shared=True,
                load_verifies=True,
                rejected=self._rejected,
                memory=self._memory,
            )
        except NoneUsable as error:
            failure = error
        # where nothing was rejected, ``restore`` has looked
        if self._stored is not None and self._rejected:
            fetched = self._stored.fetch_newer(None if path is None else step_of(path))
            if fetched is not None:
                self._rejected.pop(fetched, None)
                return fetched
        if failure is not None:
            raise failure
        return path

    def _reject(self, path: str, reason: str) -> None:
        self._warn("%s is skipped: %s", path, reason)
        self._events.write("checkpoint_rejected", path=path, reason=reason)
        if Path(path).parent == self._memory and env.world().local_rank == 0:  # on each node
            with suppress(FileNotFoundError):  # a node may lack it
                retention.delete(Path(path))

    def _set_aside_newer(self, path: str) -> None:
        on_disk = self._folder.checkpoints / Path(path).name
        for aside in worlds.broadcast_from_rank0(lambda: retention.set_aside_newer(on_disk)):
            self._warn("it is renamed to %s", aside)
        if self._stored is not None:
            self._stored.set_aside_newer(step_of(path))


def microbatch_limit(folder: RunFolder, placement: Mapping[str, Any]) -> int | None:
    """Return the largest microbatch after attempts that ran out of memory on this placement; None without any."""
    return worlds.broadcast_from_rank0(lambda: limit_tokens(folder.events(), placement))
