"""Resolves the axes that are ``auto``: the planner's choice for a known device, a simple rule otherwise.

Axes with a number keep it; the same config, ranks and device give the same layout on every rank and in the dry run. The
layout is possible (``cost/layout/possible.py``), and where the planner chose it, it fits the device
(``cost/memory/rank.py``). The simple rule: shard takes the remaining ranks, every other ``auto`` is 1. It applies on a
CPU, for a device or a network that is not known, and where nothing but shard is ``auto``.
"""

import math
from dataclasses import dataclass
from typing import Literal

from smalti.config.hardware import Hardware
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import AXES, Layout
from smalti.cost.layout.possible import check, possible_layout
from smalti.cost.layout.search import find_layouts


@dataclass(frozen=True)
class Resolved:
    """The layout of a run."""

    layout: Layout
    by: Literal["config", "rule", "planner"]
    """``config``: every axis has a number."""


def resolve(
    config: JobConfig, ranks: int | None = None, *, hardware: Hardware | None = None, node_ranks: int | None = None
) -> Resolved:
    """The layout of ``ranks`` ranks (absent: the config's), ``node_ranks`` of them on a node (absent: as many as the
    device's usual node has). ``hardware``: None where it is not known. UserError where no layout is possible or fits.
    """
    parallel = config.train.parallel
    ranks = ranks or parallel.ranks
    given = {axis: getattr(parallel, axis) for axis in AXES}
    known = bool(parallel.open_axes) and _is_known(hardware, ranks, node_ranks)
    if not isinstance(config, RunConfig) or not known:
        return Resolved(possible_layout(config, ranks), "rule" if "auto" in given.values() else "config")
    numbers = {axis: size for axis, size in given.items() if size != "auto"}
    if ranks % math.prod(size for axis, size in numbers.items() if axis != "expert"):
        possible_layout(config, ranks)  # says what would divide
    assert hardware is not None
    device = hardware if node_ranks is None else hardware.model_copy(update={"devices_per_node": node_ranks})
    layout = find_layouts(config, device, ranks, keep=1, given=numbers).best[0].prediction.layout
    check(config, layout)
    return Resolved(layout, "planner")


def _is_known(hardware: Hardware | None, ranks: int, node_ranks: int | None) -> bool:
    """Whether the planner has all figures of the devices that the ranks are on, and of the network between them."""
    if hardware is None or hardware.kind == "cpu":
        return False
    return ranks <= (node_ranks or hardware.devices_per_node) or hardware.network_bytes_per_s is not None
