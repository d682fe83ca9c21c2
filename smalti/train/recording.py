"""The recorder of a job with its sinks and trackers, and the facts that are logged when it begins."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from smalti.base.env import World
from smalti.base.errors import SmaltiError
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import Layout
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count
from smalti.distributed.parallel import fsdp
from smalti.model.blocks.attention.choice import described
from smalti.track import trackers
from smalti.track.run import RunFolder
from smalti.track.sinks.console import ConsoleSink
from smalti.track.system import System
from smalti.train.record import Recorder
from smalti.train.step import TrainState


def recorder(
    config: JobConfig,
    folder: RunFolder,
    world: World,
    events: Any,
    before: Mapping[str, Any],
    *,
    state: TrainState,
    peak: float | None,
) -> Recorder:
    """Build the recorder. ``before``: the ``train_state`` of the checkpoint."""
    return Recorder(
        _sinks(config, folder, state.step) if world.is_first else [],
        length=config.length,
        optimizer=type(state.optimizer).__name__,
        tokens_before=float(before.get("tokens", 0)),
        train_s_before=float(before.get("train_s", 0)),
        val_s_before=float(before.get("val_s", 0)),
        **_of_sequences(config, state.step),
        peak_flops_per_s=peak,
        world_size=world.world_size,
        feeds=trackers.follow(config.track, folder.path, events) if world.is_first else [],
        system=_system(config, folder) if world.is_first else None,
    )


def _sinks(config: JobConfig, folder: RunFolder, step: int) -> list[Any]:
    sinks: list[Any] = [folder.metrics_log(resumed_step=step if step else -1)]
    if config.track.console:
        sinks.append(ConsoleSink(config.length.total_steps, every_s=config.track.console_every_s))
    return sinks


def _system(config: JobConfig, folder: RunFolder) -> System | None:
    every_s = config.track.system_every_s
    return System(folder.path, every_s=every_s) if every_s else None


def _of_sequences(config: JobConfig, step: int) -> dict[str, Any]:
    """What depends on the length of the sequences of an update, numbered from 1, and how many were learned so far."""
    if not isinstance(config, RunConfig):
        return {"flops_per_token": None}
    parts = config.seq_len_parts
    flops = {seq_len: float(train_flops_per_token(config.model, seq_len)) for _, seq_len in parts}

    def seq_len_of(number: int) -> int:
        return next(seq_len for start, seq_len in reversed(parts) if start < number)

    return {
        "seq_len": seq_len_of,
        "flops_per_token": lambda number: flops[seq_len_of(number)],
        "samples_before": sum(tokens // seq_len for seq_len, tokens in config.tokens_by_seq_len(step).items()),
    }


def facts(config: JobConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Facts for the log: the size of the model and the kernels that compute it."""
    return {**size(config), **kernels(config, layout, device)}


def kernels(config: JobConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Which kernel attends, for each kind of layer, over the longest rows."""
    if not isinstance(config, RunConfig):
        return {}
    dtype = fsdp.DTYPES[config.train.precision.compute]
    tokens, packed = max(config.data.seq_lens), config.data.mask_documents
    kernels: dict[str, str] = dict(described(config.model, device, dtype, tokens, documents=packed))
    if layout.sequence > 1 and config.train.parallel.context == "ring":
        kernels = dict.fromkeys(kernels, "ring")
    return {"attention": kernels}


def size(config: JobConfig) -> dict[str, int]:
    """Parameters, for the log."""
    if not isinstance(config, RunConfig):
        return {}
    params = count(config.model)
    return {"params_total": params.total, "params_active": params.active}


def ended(folder: RunFolder, error: Exception) -> None:
    """Record that the attempt has failed, where its end is not recorded yet. Errors of the disk, and a status that
    cannot be read, are ignored: ``error`` is what the user must see."""
    with suppress(SmaltiError, OSError):
        status = folder.status()
        if status.get("attempt") == folder.attempt and status.get("state") in ("starting", "running"):
            folder.set_status("failed", reason=str(error).partition("\n")[0])


class Nowhere:
    """The event log of every rank but the first."""

    def write(self, kind: str, **fields: Any) -> None:
        """Drop it."""
