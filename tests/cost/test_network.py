"""The time of collectives: bus bandwidth as NCCL's tests define it, hops counted one by one, links by layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.hardware import hardware
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Group, group
from smalti.cost.layout.network import (
    NETWORK_FRAC,
    NODE_LINK_FRAC,
    PROTOCOLS,
    Links,
    cost,
    hierarchical,
    links,
    pairwise,
    ring,
    tree,
)

H100 = hardware("h100-sxm")
LINKS = st.builds(
    lambda per_node, nodes: Links(per_node * nodes, per_node, 370e9, 47e9),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 400),
).filter(lambda through: through.size > 1)


@given(through=LINKS, nbytes=st.floats(1e6, 1e11))
def test_transfer_is_bytes_over_bus_bandwidth(through: Links, nbytes: float) -> None:
    """doc/PERFORMANCE.md: busbw = bytes / time x (n - 1) / n for a gather, twice that for an all-reduce."""
    n = through.size
    for passes in (1, 2):
        simple = ring(nbytes, through, passes=passes)[0]
        assert nbytes / simple.transfer_s * passes * (n - 1) / n == pytest.approx(through.ring_bytes_per_s)


@given(through=LINKS)
def test_a_ring_crosses_each_border_once(through: Links) -> None:
    """A piece starts at rank 0 and goes round to the last: count its hops one by one."""
    simple = PROTOCOLS[0]
    across = simple.tree_network_hop_s if through.per_node == 1 else simple.network_hop_s
    seconds = simple.base_s
    for rank in range(1, through.size):
        seconds += simple.node_hop_s if rank // through.per_node == (rank - 1) // through.per_node else across
    assert ring(1.0, through, passes=1)[0].latency_s == pytest.approx(seconds)


@given(through=LINKS, nbytes=st.floats(1.0, 1e10), more=st.floats(1.0, 10.0))
def test_more_bytes_never_take_less(through: Links, nbytes: float, more: float) -> None:
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
        assert cost(op, nbytes * more, through).total_s >= cost(op, nbytes, through).total_s > 0


def test_small_messages_on_many_ranks_take_a_tree() -> None:
    many = Links(512, 8, 370e9, 47e9)
    assert cost("all_reduce", 8, many).algorithm == "tree"
    assert cost("all_reduce", 8e9, Links(8, 8, 370e9, 47e9)).algorithm == "ring"
    assert min(one.latency_s for one in tree(8, many)) < min(one.latency_s for one in ring(8, many, passes=2))


def test_hierarchical_all_reduce_sends_less_between_nodes() -> None:
    """Between nodes with one slow adapter each, a ring of all ranks sends all bytes, three steps only a share."""
    slow = Links(64, 8, 370e9, 1e9)
    assert hierarchical(1e9, slow).transfer_s == pytest.approx(
        2 * 7 / 8 * 1e9 / 370e9 + 2 * 7 / 8 * 1e9 / 8 / 1e9, rel=0.1
    )


def test_all_to_all_in_a_node_and_between() -> None:
    inside = pairwise(8e9, Links(8, 8, 370e9, 47e9))
    assert inside.transfer_s == pytest.approx(7 / 8 * 8e9 / 370e9)
    assert pairwise(8e9, Links(16, 8, 370e9, 47e9)).transfer_s == pytest.approx(8 / 16 * 8e9 / 47e9)


def test_links_of_a_layout() -> None:
    """A shard group over whole nodes uses every adapter of a node; a replicate group of one rank a node its own."""
    layout = Layout(replicate=4, shard=16)
    shard = links(group(layout, "shard"), H100)
    assert (shard.per_node, shard.nodes) == (8, 2)
    assert shard.ring_bytes_per_s == min(450e9 * NODE_LINK_FRAC, 8 * 50e9 * NETWORK_FRAC)
    replicate = links(group(layout, "replicate"), H100)
    assert (replicate.per_node, replicate.nodes) == (1, 4)
    assert replicate.ring_bytes_per_s == pytest.approx(50e9 * NETWORK_FRAC)


def test_axes_from_the_inside_out() -> None:
    layout = Layout(replicate=2, shard=6, sequence=4, tensor=2, pipeline=3, expert=8)
    assert group(layout, "tensor") == Group(2, 1)
    assert group(layout, "sequence") == Group(4, 2)
    assert group(layout, "expert") == Group(8, 2)
    assert group(layout, "expert_shard") == Group(3, 16)
    assert group(layout, "shard") == Group(24, 2)
    assert group(layout, "replicate") == Group(2, 48)
    assert group(layout, "pipeline") == Group(3, 96)
    assert group(layout, "world") == Group(288, 1)


def test_devices_that_nothing_joins_are_refused() -> None:
    alone = H100.model_copy(update={"network_bytes_per_s": None})
    assert cost("all_gather", 100, links(Group(8, 1), alone)).total_s > 0
    with pytest.raises(UserError, match="no network between nodes"):
        links(Group(16, 1), alone)
    with pytest.raises(UserError, match="nothing joins the devices"):
        links(Group(2, 1), alone.model_copy(update={"node_bytes_per_s": None}))
