"""Sets up a rank before anything is built: its device and threads, the process group, and the layout of the ranks."""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from smalti.base import log
from smalti.base.env import World
from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.base.machine import cpu_count
from smalti.config.durations import to_seconds
from smalti.config.hardware import hardware_of_driver
from smalti.config.identity import identity
from smalti.config.run import JobConfig
from smalti.config.show import flatten
from smalti.cost.axes import Layout, layout_of
from smalti.cost.layout import auto
from smalti.cost.layout.describe import describe_layout
from smalti.distributed.group import world as worlds
from smalti.distributed.group.allocator import keep_freed_memory
from smalti.distributed.trace.peak import matmul_rate


def join_world(
    config: JobConfig, world: World, *, own_model: bool
) -> tuple[torch.device, dict[str, Any], tuple[str, ...]]:
    """Set up the device and threads of this rank, and join the process group. A collective.

    own_model: the caller built the model. Returns the device, the values that ``auto`` was resolved to, and the host of
    each rank.
    """
    parallel = config.train.parallel
    device_error = None
    try:
        device = worlds.pick_device(parallel.device, world)
    except UserError as error:  # perhaps of this host alone: join() raises it on all ranks
        if dist.is_initialized():
            raise
        device = torch.device("cpu")
        device_error = error.message
    if device.type == "cpu":
        keep_freed_memory()
    threads = _set_threads(config, world)
    seconds, join_s = to_seconds(parallel.timeout), to_seconds(parallel.join_timeout)
    assert seconds is not None
    assert join_s is not None
    values = flatten(config.model_dump(mode="json"))
    same = {"run": digest_json(identity(config)), "placement": digest_json(values)}
    hosts = worlds.join(world, device, seconds, join_timeout_s=join_s, same=same, config=values, trouble=device_error)
    if own_model:
        _require_data_axes_only(layout_of(config, world.world_size))
    resolved: dict[str, Any] = {"ranks": world.world_size, "device": str(device), "threads": threads}
    resolved["compile"] = compiles(config, device)
    if device.type == "cuda":
        resolved["device_name"] = torch.cuda.get_device_name(device)
    return device, resolved, hosts


def _require_data_axes_only(layout: Layout) -> None:
    """Raise UserError for an axis that only Smalti's Decoder can be cut along: any but replicate and shard."""
    axis = next((axis for axis in ("tensor", "expert", "sequence", "pipeline") if getattr(layout, axis) > 1), None)
    if axis is not None:
        raise UserError(
            f"train.parallel.{axis}={getattr(layout, axis)} has no effect on a model of your own",
            allowed="replicate and shard; other axes with the model that the config describes",
            hint=f"train.parallel.{axis}=1",
        )


def _set_threads(config: JobConfig, world: World) -> int:
    wanted = config.train.parallel.threads
    threads = wanted if isinstance(wanted, int) else max(1, cpu_count() // world.local_world_size)
    torch.set_num_threads(threads)
    return threads


def compiles(config: JobConfig, device: torch.device) -> bool:
    """Return whether blocks are compiled: on CUDA, or as the config says."""
    wanted = config.train.parallel.compile
    return device.type == "cuda" if wanted == "auto" else bool(wanted)


def peak_flops_per_s(device: torch.device, precision: str, world: World) -> float | None:
    """Return the peak FLOP/s of all ranks together at ``precision``. A collective on CPU.

    It is the published peak of a known GPU and measured on a CPU; None for an unknown GPU.
    """
    if device.type == "cuda":
        known = hardware_of_driver(torch.cuda.get_device_name(device))
        peak = known.peak(precision) if known else None
        return None if peak is None else peak * world.world_size
    dist.barrier()
    rate = torch.tensor(matmul_rate(device, precision)[0], dtype=torch.float64)
    dist.all_reduce(rate)
    return float(rate)


def resolve_layout(
    config: JobConfig, device: torch.device, world: World, *, own_model: bool
) -> tuple[Layout, dict[str, Any]]:
    """Return the layout of the ranks, the same on all, and its fields of the event ``auto_resolved``. A collective.

    own_model: the caller built the model, so the layout is that of the config.
    """
    if own_model:
        layout, by = layout_of(config, world.world_size), "config"
    else:
        known = hardware_of_driver(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        ranks, node = world.world_size, world.local_world_size
        resolved = worlds.broadcast_from_rank0(lambda: auto.resolve(config, ranks, hardware=known, node_ranks=node))
        layout, by = resolved.layout, resolved.by
    if world.is_first and layout.axes_in_use > 1:
        log.get("train").info("%s", "\n  ".join(describe_layout(layout, world.local_world_size)))
    return layout, {"axes": asdict(layout), "axes_by": by}
