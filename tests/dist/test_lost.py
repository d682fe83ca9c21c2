"""A rank that does not answer is named by those that wait for it; other errors stay what they are."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from smalti.base.errors import UserError
from smalti.dist import lost

HOSTS = ("a", "a", "b")


def _wait_for_a_silent_one(rank: int, ask: bool) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = 2.0
    if rank == 2:
        store.wait(["told/0", "told/1"])
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        with pytest.raises(lost.LostPeer) as told:
            lost.raise_told(error, HOSTS, ask=ask)
        store.set(f"told/{rank}", "")
        return told.value.message, int(told.value.exit_code)
    return "nothing was lost"


@pytest.mark.slow
def test_the_silent_rank_is_named_with_its_host():
    first, second, _ = run_ranks(3, _wait_for_a_silent_one, True)
    assert first[0].startswith("rank 0 lost rank 2 (b), which does not answer: ")
    assert second[0].startswith("rank 1 lost rank 2 (b), which does not answer: ")
    assert (first[1], second[1]) == (75, 75)


def _wait_for_one_that_fails(rank: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = 5.0
    error = UserError("no") if rank == 1 else RuntimeError("Connection closed by peer")
    if rank == 0:
        store.wait(["lost/1"])
    with pytest.raises(Exception, match=r"no|lost") as told:
        lost.raise_told(error, HOSTS)
    dist.barrier()
    return type(told.value).__name__, str(told.value).splitlines()[0]


def test_a_rank_that_failed_by_itself_is_named_with_its_error():
    first, second = run_ranks(2, _wait_for_one_that_fails)
    assert second == ("UserError", "no")
    assert first == ("LostPeer", "rank 0 lost rank 1 (a), which ended with UserError: no: Connection closed by peer")


def test_alone_an_error_stays_what_it_is():
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as told:
        lost.raise_told(error, ())
    assert told.value is error
