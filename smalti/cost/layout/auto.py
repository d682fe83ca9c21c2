"""Resolves axes that are ``auto``: by the planner for a known device, by a simple rule otherwise.

The rule: shard takes the remaining ranks, every other ``auto`` is 1. It applies on a CPU, for an unknown device or
network, and if only shard is ``auto``. The layout is possible (``cost/layout/possible.py``) and the same on every rank
and in the dry run; the planner's also fits the device (``cost/memory/per_rank.py``).
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
    """Return the layout of ``ranks`` ranks (None: the config's); axes with a number keep it.

    node_ranks: ranks on a node (None: the devices of a usual node). hardware: None if unknown. UserError if no layout
    is possible or fits.
    """
    parallel = config.train.parallel
    ranks = ranks or parallel.ranks
    values = {axis: getattr(parallel, axis) for axis in AXES}
    known = bool(parallel.open_axes) and _is_known(hardware, ranks, node_ranks)
    if not isinstance(config, RunConfig) or not known:
        return Resolved(possible_layout(config, ranks), "rule" if "auto" in values.values() else "config")
    numbers = {axis: size for axis, size in values.items() if size != "auto"}
    if ranks % math.prod(size for axis, size in numbers.items() if axis != "expert"):
        possible_layout(config, ranks)  # its error names what would divide
    assert hardware is not None
    device = hardware if node_ranks is None else hardware.model_copy(update={"devices_per_node": node_ranks})
    layout = find_layouts(config, device, ranks, keep=1, fixed=numbers).best[0].prediction.layout
    check(config, layout)
    return Resolved(layout, "planner")


def _is_known(hardware: Hardware | None, ranks: int, node_ranks: int | None) -> bool:
    """Return True if the planner has all figures of the ranks' devices and of the network between them."""
    if hardware is None or hardware.kind == "cpu":
        return False
    return ranks <= (node_ranks or hardware.devices_per_node) or hardware.network_bytes_per_s is not None
