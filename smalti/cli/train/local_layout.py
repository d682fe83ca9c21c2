"""Resolve the layout of a run on this machine, for the checks before its start and for the dry run.

For devices that this machine does not have, the simple rule of ``cost/layout/auto.py`` applies, and the printed line
says so.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.layout.auto import Resolved

_USUAL_NODE = 8
"""GPUs of a node, where this machine has none."""


def local_layout(config: "RunConfig", ranks: int) -> "Resolved":
    """Return the layout of ``ranks``. Raises UserError with the nearest possible layout if the axes do not fit."""
    from smalti.cost.layout.auto import resolve

    return resolve(config, ranks, hardware=_device(config), node_ranks=_node_ranks(config, ranks))


def layout_lines(config: "RunConfig", ranks: int) -> list[str]:
    """Return the lines of ``--dry-run``: the layout, and for several axes which ranks share what."""
    from smalti.cost.layout.describe import describe_layout

    resolved = local_layout(config, ranks)
    how = {"config": "", "rule": ""}.get(resolved.by, "; axes chosen by the planner")
    if resolved.by == "rule" and config.train.parallel.open_axes:
        how = "; no known GPU on this machine, so axes that are auto follow the simple rule"
    count = f"{ranks:,} {'rank' if ranks == 1 else 'ranks'}"
    lines = [f"placement  {count} on {config.train.parallel.device}: {resolved.layout}{how}"]
    if resolved.layout.axes_in_use > 1:
        lines += [f"           {line}" for line in describe_layout(resolved.layout, _node_ranks(config, ranks))[1:]]
    return lines


def _device(config: "RunConfig") -> "Hardware | None":
    """Return the GPU that the driver lists; it is read only where a choice depends on it."""
    from smalti.config.hardware import hardware_of_driver

    names = [] if config.train.parallel.device == "cpu" or not config.train.parallel.open_axes else _local_gpus()
    return hardware_of_driver(names[0]) if names else None


def _local_gpus() -> list[str]:
    from smalti.fleet import machine

    return [device["name"] for device in machine.gpus()["devices"]]


def _node_ranks(config: "RunConfig", ranks: int) -> int:
    """Return the ranks of a node: as a launcher started them here; else all; for a recipe with GPUs on a machine
    without any, those of a usual node."""
    from smalti.base.env import inside_world, world

    if inside_world():
        return world().local_world_size
    if config.train.nodes is not None:
        return max(1, ranks // config.train.nodes.count)
    elsewhere = config.train.parallel.device == "cuda" and not _local_gpus()
    return min(ranks, _USUAL_NODE) if elsewhere else ranks
