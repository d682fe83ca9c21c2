"""A layout in lines for people: what the ranks of each axis share, which ranks those are, and what lies on each node.

Promises: groups are those of ``plan.parallel.collectives.group``, which is how ``distributed/parallel/mesh.py``
numbers the ranks; of
many groups and nodes the first and the last are shown.
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
_MOST_NODES, _MOST_RANKS = 6, 10


def describe_layout(layout: Layout, node_ranks: int) -> list[str]:
    """Lines without a trailing newline; ``node_ranks``: how many ranks lie on a node."""
    world = layout.world_size
    nodes = -(-world // node_ranks)
    where = f"{nodes:,} nodes of {node_ranks}" if nodes > 1 else "one node"
    lines = [f"layout: {layout} = {world:,} ranks on {where}"]
    for axis, shares in _SHARES.items():
        found = group(layout, axis)
        if found.size == 1:
            continue
        span = found.size * found.stride
        inside = span <= node_ranks and node_ranks % span == 0
        name = axis if axis != "shard" or layout.sequence == 1 else "shard x sequence"
        wide = "inside a node" if inside else "across nodes"
        lines.append(f"{name:<16} {found.size:>4} ranks {shares}; {wide}: {_groups(layout, axis)}")
    return lines + (_nodes(layout, node_ranks, nodes) if nodes > 1 else [])


def groups(layout: Layout, axis: Axis) -> list[list[int]]:
    """Ranks that meet along an axis, in the order of their first one."""
    found = group(layout, axis)
    block = found.size * found.stride
    return [
        [start + place + step * found.stride for step in range(found.size)]
        for start in range(0, layout.world_size, block)
        for place in range(found.stride)
    ]


def _groups(layout: Layout, axis: Axis) -> str:
    found = groups(layout, axis)
    shown = [_ranks(one) for one in found[:2]]
    if len(found) > 3:
        shown.append(f"... {_ranks(found[-1])} ({len(found):,} groups)")
    return " | ".join(shown + [_ranks(one) for one in found[2:3] if len(found) == 3])


def _ranks(ranks: Sequence[int]) -> str:
    """``0-7``, ``0 4 8 12``, or the first of many with the step between them."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    if step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} {ranks[2]} ... {ranks[-1]}"


def _nodes(layout: Layout, node_ranks: int, nodes: int) -> list[str]:
    shown = range(nodes) if nodes <= _MOST_NODES else [*range(_MOST_NODES - 2), nodes - 1]
    lines, before = [], -1
    for node in shown:
        if node != before + 1:
            lines.append(f"...       {node - before - 1:,} nodes more")
        before = node
        first, last = node * node_ranks, min((node + 1) * node_ranks, layout.world_size) - 1
        lines.append(f"node {node:<4} ranks {first}-{last}: {_held(layout, first, last)}")
    return lines


def _held(layout: Layout, first: int, last: int) -> str:
    """Which part of each axis a span of ranks holds."""
    axes: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "tensor")
    parts = []
    for axis in axes:
        found = group(layout, axis)
        if found.size == 1:
            continue
        places = sorted({rank // found.stride % found.size for rank in range(first, last + 1)})
        span = _ranks(places)
        parts.append(f"{axis} {'all' if len(places) == found.size else f'{span} of {found.size}'}")
    return ", ".join(parts)
