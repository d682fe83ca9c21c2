"""The time of a collective: latency and bandwidth (alpha-beta) of the algorithms that NCCL chooses from.

An estimate for large messages on an idle network; topology between nodes, congestion and reductions in switches (SHARP,
NVLS) are not modelled. Sources: Thakur, Rabenseifner and Gropp 2005 (ring and tree costs), NVIDIA nccl-tests,
doc/PERFORMANCE.md (share of bytes over a link), NVIDIA nccl 5067397c (2026-06), src/graph/tuning.cc (latencies of hops,
protocols) and topo.h (NVLink's payload).
"""

import math
from dataclasses import dataclass
from typing import Literal

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.cost.layout.collectives import Group, Op

Algorithm = Literal["ring", "tree", "pairwise", "send", "hierarchical"]

NODE_LINK_FRAC = 0.82
"""Share of a node link's rate that carries payload: NCCL assumes 18 x 20.6 of 450 GB/s on Hopper, 12 x 20 of 300
on Ampere."""
NETWORK_FRAC = 0.94
"""The same of an adapter: 46 to 48 of 50 GB/s (a maintainer in NVIDIA/nccl-tests#290)."""


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: the latency of a hop, and the share of bandwidth for payload."""

    name: str
    base_s: float
    """Latency once per collective."""
    node_hop_s: float
    """Latency to the next rank in the node."""
    network_hop_s: float
    """Latency to the next node."""
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
    """The links between the ranks of a group.

    Nodes have equal devices, each with its own adapter; every ring crosses a node boundary through another adapter.
    """

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
        """Bandwidth of a ring through all ranks: there are as many rings as ranks in a node, each with its own
        adapter."""
        if self.nodes == 1:
            return self.node_bytes_per_s
        across = self.per_node * self.network_bytes_per_s
        return across if self.per_node == 1 else min(self.node_bytes_per_s, across)


def links(group: Group, hardware: Hardware) -> Links:
    """Return the links of a group on nodes of ``hardware``; UserError if no link joins its ranks."""
    fits = max(1, hardware.devices_per_node // group.stride)
    per_node = min(group.size, fits)
    while group.size % per_node:
        per_node -= 1
    node, network = hardware.node_bytes_per_s, hardware.network_bytes_per_s
    if per_node > 1 and node is None:
        raise UserError(f"{hardware.title}: nothing joins the devices of a node", allowed="layouts of one device")
    if group.size > per_node and network is None:
        raise UserError(
            f"{hardware.title}: no network between nodes is known, and {group.size} ranks do not fit into one",
            allowed=f"at most {hardware.devices_per_node} ranks, or a hardware file with network_bytes_per_s",
            hint=f"smalti plan hardware {hardware.name} --json > mine.yaml, add network_bytes_per_s and its source, "
            "--gpu mine.yaml",
        )
    return Links(group.size, per_node, (node or 0) * NODE_LINK_FRAC, (network or 0) * NETWORK_FRAC)


@dataclass(frozen=True)
class Cost:
    """Seconds of one call of a collective."""

    algorithm: Algorithm
    latency_s: float
    """Hops from rank to rank, whatever the bytes are."""
    transfer_s: float
    """Bytes over the slowest link."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.latency_s + self.transfer_s


def cost(op: Op, nbytes: float, through: Links) -> Cost:
    """One call of ``nbytes`` (as ``Collective.bytes``) by the algorithm and protocol that NCCL would take."""
    if through.size == 1:
        return Cost("ring", 0.0, 0.0)
    if op == "all_to_all":
        return pairwise(nbytes, through)
    if op == "send_recv":
        return send(nbytes, through)
    costs = [*ring(nbytes, through, passes=2 if op == "all_reduce" else 1)]
    if op == "all_reduce":
        costs += tree(nbytes, through)
    return min(costs, key=lambda candidate: candidate.total_s)


def ring(nbytes: float, through: Links, *, passes: Literal[1, 2]) -> list[Cost]:
    """passes ((n - 1) hops + (n - 1) / n bytes / rate), by protocol: one pass gathers or reduce-scatters, two
    all-reduce."""
    n, crossings, costs = through.size, through.nodes - 1, []
    transfer_s = passes * (n - 1) / n * nbytes / through.ring_bytes_per_s
    for protocol in PROTOCOLS:
        across_s = protocol.tree_network_hop_s if through.per_node == 1 else protocol.network_hop_s
        hops_s = (n - 1 - crossings) * protocol.node_hop_s + crossings * across_s
        costs.append(Cost("ring", protocol.base_s + passes * hops_s, transfer_s / protocol.rate_frac))
    return costs


def tree(nbytes: float, through: Links) -> list[Cost]:
    """Up and down a pair of binary trees over nodes, a chain inside each (Sanders, Speck and Traff 2009): all-reduce.

    2 ((r - 1) + log2 N) hops + 2 bytes / (0.92 rate), as NCCL computes it, by protocol.
    """
    costs, depth = [], math.ceil(math.log2(through.nodes))
    transfer_s = 2 * nbytes / (0.92 * through.ring_bytes_per_s)
    for protocol in PROTOCOLS:
        hops_s = (through.per_node - 1) * protocol.node_hop_s + depth * protocol.tree_network_hop_s
        costs.append(Cost("tree", protocol.base_s + 2 * hops_s, transfer_s / protocol.rate_frac))
    return costs


def hierarchical(nbytes: float, through: Links) -> Cost:
    """All-reduce in three: reduce-scatter in the node, all-reduce of a share between nodes, gather in the node.

    What HSDP does by its layout (``shard`` in a node, ``replicate`` between); no choice of NCCL's.
    """
    node, network, r = through.node_bytes_per_s, through.network_bytes_per_s, through.per_node
    inner = cost("all_gather", nbytes, Links(r, r, node, network))
    outer = cost("all_reduce", nbytes / r, Links(through.nodes, 1, node, network))
    latency_s, transfer_s = (2 * getattr(inner, name) + getattr(outer, name) for name in ("latency_s", "transfer_s"))
    return Cost("hierarchical", latency_s, transfer_s)


def pairwise(nbytes: float, through: Links) -> Cost:
    """All-to-all, each rank to each; in the node and between nodes side by side."""
    simple, n, r, crossings = PROTOCOLS[0], through.size, through.per_node, through.nodes - 1
    inside_s = (r - 1) / n * nbytes / through.node_bytes_per_s if r > 1 else 0.0
    across_s = (n - r) / n * nbytes / through.network_bytes_per_s if crossings else 0.0
    hops_s = max((r - 1) * simple.node_hop_s, crossings * simple.network_hop_s)
    return Cost("pairwise", simple.base_s + hops_s, max(inside_s, across_s))


def send(nbytes: float, through: Links) -> Cost:
    """To the next rank, the slowest of them: over the network as soon as the group leaves a node."""
    simple = PROTOCOLS[0]
    if through.nodes == 1:
        return Cost("send", simple.base_s + simple.node_hop_s, nbytes / through.node_bytes_per_s)
    return Cost("send", simple.base_s + simple.network_hop_s, nbytes / through.network_bytes_per_s)
