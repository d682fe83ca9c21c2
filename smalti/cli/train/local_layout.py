"""The layout that a run would get where it is started now, and how it is said: for the check before it and the dry run.

Promises: the same layout as the ranks find, where they run on the devices that are seen from here. A device that is not
here is not known here; the simple rule of ``cost/layout/auto.py`` holds then, and the line says so.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.layout.auto import Resolved

_USUAL_NODE = 8
"""GPUs of a node, where none is seen from here."""


def local_layout(config: "RunConfig", ranks: int) -> "Resolved":
    """UserError with the nearest possible layout where the axes cannot be laid over ``ranks``."""
    from smalti.cost.layout.auto import resolve

    return resolve(config, ranks, hardware=_device(config), node_ranks=_node_ranks(config, ranks))


def layout_lines(config: "RunConfig", ranks: int) -> list[str]:
    """What ``--dry-run`` says: the layout, and on several axes which ranks share what."""
    from smalti.cost.layout.describe import describe_layout

    found = local_layout(config, ranks)
    how = {"config": "", "rule": ""}.get(found.by, "; axes chosen by the planner")
    if found.by == "rule" and config.train.parallel.open_axes:
        how = "; no GPU is known here, so axes that are auto take the simple rule"
    count = f"{ranks:,} {'rank' if ranks == 1 else 'ranks'}"
    lines = [f"placement  {count} on {config.train.parallel.device}: {found.layout}{how}"]
    if found.layout.axes_in_use > 1:
        lines += [f"           {line}" for line in describe_layout(found.layout, _node_ranks(config, ranks))[1:]]
    return lines


def _device(config: "RunConfig") -> "Hardware | None":
    """The GPU that the driver lists here, looked for only where a choice depends on it."""
    from smalti.config.hardware import hardware_of_driver

    names = [] if config.train.parallel.device == "cpu" or not config.train.parallel.open_axes else _gpus_here()
    return hardware_of_driver(names[0]) if names else None


def _gpus_here() -> list[str]:
    from smalti.fleet import machine

    return [device["name"] for device in machine.gpus()["devices"]]


def _node_ranks(config: "RunConfig", ranks: int) -> int:
    """Ranks on a node: those that a launcher started here; else all of them; without a GPU here those of a usual node
    where the recipe asks for GPUs."""
    from smalti.base.env import inside_world, world

    if inside_world():
        return world().local_world_size
    elsewhere = config.train.parallel.device == "cuda" and not _gpus_here()
    return min(ranks, _USUAL_NODE) if elsewhere else ranks
