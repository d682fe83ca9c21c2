"""How long a collective takes: latency and bandwidth (alpha-beta) of the algorithms that NCCL chooses from.

Promises an estimate for large messages on an idle network of nodes with equal devices, each with its own adapter (every
ring crosses a node boundary through another one). Does not know topology between nodes, congestion, or reductions in
switches (SHARP, NVLS). Sources: Thakur, Rabenseifner and Gropp 2005 (ring and tree costs), NVIDIA nccl-tests,
doc/PERFORMANCE.md (what share of the bytes crosses a link), NVIDIA nccl 5067397c (2026-06), src/graph/tuning.cc
(latencies of hops, protocols) and topo.h (what NVLink carries).
"""

import math
from dataclasses import dataclass
from typing import Literal

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.plan.collectives import Axis, Collective, Group, Op, group
from smalti.plan.layout import Layout

Algorithm = Literal["ring", "tree", "pairwise", "send", "hierarchical"]

NODE_LINK_FRAC = 0.82
"""Share of a node link's rate that carries payload: NCCL reckons with 18 x 20.6 of 450 GB/s on Hopper, 12 x 20 of 300
on Ampere."""
NETWORK_FRAC = 0.94
"""The same of an adapter: 46 to 48 of 50 GB/s (a maintainer in NVIDIA/nccl-tests#290)."""


@dataclass(frozen=True)
class Protocol:
    """How NCCL moves bytes: what a hop costs, and what share of the bandwidth is left."""

    name: str
    base_s: float
    """Once for a collective."""
    node_hop_s: float
    """To the next rank in the node."""
    network_hop_s: float
    """To the next node."""
    tree_network_hop_s: float
    """The same in a tree, or where each node has one rank."""
    rate_frac: float


PROTOCOLS = (
    Protocol("simple", 8.4e-6, 3.4e-6, 14e-6, 14e-6, 1.0),
    Protocol("ll128", 14e-6, 1.9e-6, 4e-6, 8.5e-6, 0.92),
)
"""NCCL's tuning table for NVLink and network. Its third protocol, LL, carries at most half of the bandwidth and is
chosen for messages far below those of training."""


@dataclass(frozen=True)
class Links:
    """The links that a group of ranks meets."""

    size: int
    per_node: int
    """Ranks of the group in one node."""
    node_bytes_per_s: float
    """Payload of one rank to the others of its node."""
    network_bytes_per_s: float
    """Payload of one rank's share of the network."""

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return -(-self.size // self.per_node)

    @property
    def ring_bytes_per_s(self) -> float:
        """Of a ring through all ranks: as many rings as a node has ranks, each through an adapter of its own."""
        if self.nodes == 1:
            return self.node_bytes_per_s
        across = self.per_node * self.network_bytes_per_s
        return across if self.per_node == 1 else min(self.node_bytes_per_s, across)


def links(found: Group, hardware: Hardware) -> Links:
    """The links of a group on nodes of ``hardware``; UserError where nothing joins its ranks."""
    fits = max(1, hardware.devices_per_node // found.stride)
    per_node = min(found.size, fits)
    while found.size % per_node:
        per_node -= 1
    node, network = hardware.node_bytes_per_s, hardware.network_bytes_per_s
    if per_node > 1 and node is None:
        raise UserError(f"{hardware.title}: nothing joins the devices of a node", allowed="layouts of one device")
    if found.size > per_node and network is None:
        raise UserError(
            f"{hardware.title}: no network between nodes is known, and {found.size} ranks do not fit into one",
            allowed=f"at most {hardware.devices_per_node} ranks, or a hardware file with network_bytes_per_s",
            hint=f"smalti plan hardware {hardware.name} --json > mine.json, add network_bytes_per_s, --gpu mine.yaml",
        )
    return Links(found.size, per_node, (node or 0) * NODE_LINK_FRAC, (network or 0) * NETWORK_FRAC)


def collective_time(collective: Collective, hardware: Hardware, layout: Layout) -> float:
    """Seconds of all calls of ``collective`` in a step, one after another, by the fastest algorithm."""
    return collective.count * call_time(collective.op, collective.axis, collective.bytes, hardware, layout)


def call_time(op: Op, axis: Axis, nbytes: float, hardware: Hardware, layout: Layout) -> float:
    """Seconds of one call."""
    return fastest(op, nbytes, links(group(layout, axis), hardware))[1]


def fastest(op: Op, nbytes: float, through: Links) -> tuple[Algorithm, float]:
    """The algorithm that NCCL would take for one call of ``nbytes`` (as ``Collective.bytes``), and its seconds."""
    if through.size == 1:
        return "ring", 0.0
    if op == "all_to_all":
        return "pairwise", pairwise_s(nbytes, through)
    if op == "send_recv":
        return "send", send_s(nbytes, through)
    passes: Literal[1, 2] = 2 if op == "all_reduce" else 1
    found: list[tuple[Algorithm, float]] = [("ring", ring_s(nbytes, through, passes=passes))]
    if op == "all_reduce":
        found.append(("tree", tree_s(nbytes, through)))
    return min(found, key=lambda one: one[1])


def ring_s(nbytes: float, through: Links, *, passes: Literal[1, 2]) -> float:
    """passes ((n - 1) hops + (n - 1) / n bytes / rate): one pass gathers or reduce-scatters, two all-reduce."""
    n, between = through.size, through.nodes if through.nodes > 1 else 1
    crossings = between - 1
    share = (n - 1) / n * nbytes / through.ring_bytes_per_s

    def seconds(how: Protocol) -> float:
        across = how.tree_network_hop_s if through.per_node == 1 else how.network_hop_s
        hops = (n - 1 - crossings) * how.node_hop_s + crossings * across
        return how.base_s + passes * (hops + share / how.rate_frac)

    return min(seconds(how) for how in PROTOCOLS)


def tree_s(nbytes: float, through: Links) -> float:
    """Up and down a pair of binary trees over nodes, a chain inside each (Sanders, Speck and Traff 2009).

    2 ((r - 1) + log2 N) hops + 2 bytes / (0.92 rate), as NCCL reckons; all-reduce alone.
    """
    share = 2 * nbytes / (0.92 * through.ring_bytes_per_s)

    def seconds(how: Protocol) -> float:
        depth = math.ceil(math.log2(through.nodes)) * how.tree_network_hop_s
        return how.base_s + 2 * ((through.per_node - 1) * how.node_hop_s + depth) + share / how.rate_frac

    return min(seconds(how) for how in PROTOCOLS)


def hierarchical_s(nbytes: float, through: Links) -> float:
    """All-reduce in three: reduce-scatter in the node, all-reduce of a share between nodes, gather in the node.

    What HSDP does by its layout (``shard`` in a node, ``replicate`` between); no choice of NCCL's.
    """
    inside = Links(through.per_node, through.per_node, through.node_bytes_per_s, through.network_bytes_per_s)
    across = Links(through.nodes, 1, through.node_bytes_per_s, through.network_bytes_per_s)
    inner = ring_s(nbytes, inside, passes=1) if inside.size > 1 else 0.0
    outer = fastest("all_reduce", nbytes / through.per_node, across)[1]
    return 2 * inner + outer


def pairwise_s(nbytes: float, through: Links) -> float:
    """All-to-all, each rank to each: bytes in the node and between nodes travel side by side."""
    simple, n, r = PROTOCOLS[0], through.size, through.per_node
    inside = (r - 1) * simple.node_hop_s
    inside += (r - 1) / n * nbytes / through.node_bytes_per_s if r > 1 else 0.0
    if through.nodes == 1:
        return simple.base_s + inside
    across = (through.nodes - 1) * simple.network_hop_s + (n - r) / n * nbytes / through.network_bytes_per_s
    return simple.base_s + max(inside, across)


def send_s(nbytes: float, through: Links) -> float:
    """To the next rank, the slowest of them: over the network as soon as the group leaves a node."""
    simple = PROTOCOLS[0]
    if through.nodes == 1:
        return simple.base_s + simple.node_hop_s + nbytes / through.node_bytes_per_s
    return simple.base_s + simple.network_hop_s + nbytes / through.network_bytes_per_s
