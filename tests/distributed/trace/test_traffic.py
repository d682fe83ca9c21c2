"""The log of collectives: each is named after its axis, with the bytes of its larger buffer, and when it was done."""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from smalti.base import clock
from smalti.cost.axes import Layout
from smalti.distributed.group import mesh as meshes
from smalti.distributed.trace.traffic import Call, Total, Traffic, totals

_SEEN = ("all_reduce", "all_gather")
"""Whose end the host can always see."""


def _all_kinds(rank: int) -> tuple[list[Call], float]:
    mesh, votes = meshes.build(torch.device("cpu"), Layout(replicate=2, sequence=2)), dist.new_group(backend="gloo")
    sequence, other = mesh.group("sequence"), 1 - mesh.local_rank("sequence")
    row, gathered = torch.ones(6, requires_grad=True), torch.empty(12)
    with Traffic(mesh, timed=True) as traffic:
        dist.all_reduce(row.detach().clone(), group=mesh.group("replicate"))
        dist.all_reduce(torch.ones(5, dtype=torch.float64))
        dist.all_reduce(torch.ones(3, dtype=torch.int32), group=votes)
        sent = functional.all_to_all_single_autograd(row, [3, 3], [3, 3], sequence)
        torch.autograd.backward((sent * 2).sum())
        ends = (dist.isend, row.detach()), (dist.irecv, torch.empty(6))
        for work in dist.batch_isend_irecv([dist.P2POp(op, t, group=sequence, group_peer=other) for op, t in ends]):
            work.wait()
        with traffic.times(3):
            dist.all_gather_into_tensor(gathered, row.detach(), group=mesh.group("shard"), async_op=True).wait()
    deadline_s = clock.now_s() + 10
    while any(call.end_s is None for call in traffic.calls if call.op in _SEEN) and clock.now_s() < deadline_s:
        time.sleep(0.01)  # a thread of gloo's reports the end of a call
    assert row.grad is not None
    return traffic.calls, float(row.grad.sum())


def test_every_collective_is_named_by_its_axis() -> None:
    for calls, gradient in run_ranks(4, _all_kinds):
        assert gradient == 12, "nothing is changed"
        assert [(call.op, call.axis, call.bytes, call.times) for call in calls] == [
            ("all_reduce", "replicate", 24, 1),
            ("all_reduce", "world", 40, 1),
            ("all_reduce", "world", 12, 1),
            ("all_to_all", "sequence", 24, 1),
            ("all_to_all", "sequence", 24, 1),
            ("send", "sequence", 24, 1),
            ("recv", "sequence", 24, 1),
            ("all_gather", "shard", 48, 3),
        ]
        for call in calls:
            if call.op in _SEEN:
                assert call.start_s is not None
                assert call.end_s is not None
                assert call.start_s <= call.end_s
        assert Total("send_recv", "sequence", 1, 24) in totals(calls)
        assert Total("all_gather", "shard", 3, 48) in totals(calls)


def _whole_world(rank: int) -> list[tuple[str, str]]:
    """One group is the world, shard and expert at once."""
    mesh = meshes.build(torch.device("cpu"), Layout(shard=2, expert=2))
    with Traffic(mesh) as traffic:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=mesh.group("shard"))
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=mesh.group("expert"))
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.barrier()
    return [(call.op, call.axis) for call in traffic.calls]


def test_one_group_of_several_axes() -> None:
    calls_of_ranks = run_ranks(2, _whole_world)
    assert calls_of_ranks[0] == calls_of_ranks[1]
    assert calls_of_ranks[0] == [
        ("all_gather", "shard"),
        ("all_to_all", "expert"),
        ("all_reduce", "world"),
        ("barrier", "world"),
    ]


_CALLS = st.builds(
    Call,
    op=st.sampled_from(["all_gather", "send", "recv"]),
    axis=st.sampled_from(["shard", "pipeline"]),
    bytes=st.sampled_from([0, 8, 64]),
    times=st.integers(1, 5),
    to_higher_rank=st.booleans(),
)


@given(st.lists(_CALLS, max_size=12))
def test_totals_lose_nothing(calls: list[Call]) -> None:
    counted = Counter[Any]()
    for call in calls:
        is_back = call.axis == "pipeline" and not call.to_higher_rank
        counted[call.op, call.axis, call.bytes, is_back] += call.times
    for total in totals(calls):

        def pop(op: str, is_back: bool, total: Total = total) -> int:
            return counted.pop((op, total.axis, total.bytes, is_back), 0)

        if total.op == "send_recv":
            pairs = [[pop(op, is_back) for op in ("send", "recv")] for is_back in (True, False)]
            assert total.count == sum(map(max, pairs))
        else:
            assert sum(pop(total.op, is_back) for is_back in (True, False)) == total.count
    assert not counted
