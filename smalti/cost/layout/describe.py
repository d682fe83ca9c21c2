"""Describes a layout as text: what the ranks of each axis share, the groups of ranks, and the ranks of each node.

Groups are those of ``cost.layout.collectives.group``, the numbering of ``distributed/group/mesh.py``; of many groups
and nodes the first and the last are shown.
"""

from collections.abc import Sequence

from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Axis, group

_SHARES: dict[Axis, str] = {
    "pipeline": "share the layers, a span each",
    "replicate": "hold the same weights and read other rows",
    "shard": "share weights, gradients and moments, a part each",
    "expert": "share the experts of a layer, some each",
    "sequence": "share each row of tokens, a part each",
    "tensor": "share each matrix, a part each",
}
_MAX_NODES, _MAX_RANKS = 6, 10


def describe_layout(layout: Layout, node_ranks: int) -> list[str]:
    """Return the lines of the description; ``node_ranks``: ranks on a node."""
    world = layout.world_size
    nodes = -(-world // node_ranks)
    where = f"{nodes:,} nodes of {node_ranks}" if nodes > 1 else "one node"
    lines = [f"layout: {layout} = {world:,} ranks on {where}"]
    for axis, shares in _SHARES.items():
        ranks_of_axis = group(layout, axis)
        if ranks_of_axis.size == 1:
            continue
        span = ranks_of_axis.size * ranks_of_axis.stride
        inside = span <= node_ranks and node_ranks % span == 0
        name = axis if axis != "shard" or layout.sequence == 1 else "shard x sequence"
        wide = "inside a node" if inside else "across nodes"
        lines.append(f"{name:<16} {ranks_of_axis.size:>4} ranks {shares}; {wide}: {_groups(layout, axis)}")
    return lines + (_nodes(layout, node_ranks, nodes) if nodes > 1 else [])


def groups(layout: Layout, axis: Axis) -> list[list[int]]:
    """Return the groups of ranks along an axis, ordered by their first rank."""
    group_of_axis = group(layout, axis)
    block = group_of_axis.size * group_of_axis.stride
    return [
        [start + place + step * group_of_axis.stride for step in range(group_of_axis.size)]
        for start in range(0, layout.world_size, block)
        for place in range(group_of_axis.stride)
    ]


def _groups(layout: Layout, axis: Axis) -> str:
    all_groups = groups(layout, axis)
    shown = [_ranks(ranks) for ranks in all_groups[:2]]
    if len(all_groups) > 3:
        shown.append(f"... {_ranks(all_groups[-1])} ({len(all_groups):,} groups)")
    return " | ".join(shown + [_ranks(ranks) for ranks in all_groups[2:3] if len(all_groups) == 3])


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``0-7``, ``0 4 8 12``, or the first three and the last of many."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    if step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MAX_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} {ranks[2]} ... {ranks[-1]}"


def _nodes(layout: Layout, node_ranks: int, nodes: int) -> list[str]:
    shown = range(nodes) if nodes <= _MAX_NODES else [*range(_MAX_NODES - 2), nodes - 1]
    lines, before = [], -1
    for node in shown:
        if node != before + 1:
            lines.append(f"...       {node - before - 1:,} nodes more")
        before = node
        first, last = node * node_ranks, min((node + 1) * node_ranks, layout.world_size) - 1
        lines.append(f"node {node:<4} ranks {first}-{last}: {_held(layout, first, last)}")
    return lines


def _held(layout: Layout, first: int, last: int) -> str:
    """Return the part of each axis that a span of ranks holds."""
    axes: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "tensor")
    parts = []
    for axis in axes:
        group_of_axis = group(layout, axis)
        if group_of_axis.size == 1:
            continue
        places = sorted({rank // group_of_axis.stride % group_of_axis.size for rank in range(first, last + 1)})
        span = _ranks(places)
        parts.append(f"{axis} {'all' if len(places) == group_of_axis.size else f'{span} of {group_of_axis.size}'}")
    return ", ".join(parts)
