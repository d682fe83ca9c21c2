"""A rank that does not answer is named by those that wait for it; other errors stay what they are."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from smalti.base.errors import CheckFailed, DataError, Interrupted, RetryableError, UserError
from smalti.distributed.group import lost

HOSTS = ("a", "a", "b")


def _wait_for_a_silent_one(rank: int, find_silent: bool) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = 2.0
    if rank == 2:
        store.wait(["done/0", "done/1"])
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        with pytest.raises(lost.LostPeer) as raised:
            lost.raise_with_lost_ranks(error, HOSTS, find_silent=find_silent)
        store.set(f"done/{rank}", "")
        return raised.value.message, int(raised.value.exit_code)
    return "nothing was lost"


@pytest.mark.slow
def test_the_silent_rank_is_named_with_its_host():
    first, second, _ = run_ranks(3, _wait_for_a_silent_one, True)
    assert first[0].startswith("rank 0 lost rank 2 (b), which does not answer: ")
    assert second[0].startswith("rank 1 lost rank 2 (b), which does not answer: ")
    assert (first[1], second[1]) == (75, 75)


def _wait_for_one_that_fails(rank: int, failure: Exception) -> Any:
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = 5.0
    error = failure if rank == 1 else RuntimeError("Connection closed by peer")
    if rank != 1:
        store.wait(["lost/1"])
    with pytest.raises(Exception, match=r"no|lost") as raised:
        lost.raise_with_lost_ranks(error, HOSTS)
    dist.barrier()
    left = (int(raised.value.exit_code), raised.value.writes) if isinstance(raised.value, lost.LostPeer) else None
    return type(raised.value).__name__, str(raised.value).splitlines()[0], left


@pytest.mark.parametrize(("failure", "code"), [(UserError("no"), 2), (RetryableError("no"), 75)])
def test_a_rank_that_failed_by_itself_is_named_with_its_error_and_ends_all_with_its_code(failure, code):
    first, second, third = run_ranks(3, _wait_for_one_that_fails, failure)
    name = type(failure).__name__
    assert second == (name, "no", None)
    text = f"lost rank 1 (a), which ended with {name}: no: Connection closed by peer"
    assert first == ("LostPeer", f"rank 0 {text}", (code, True)), "the first that is left puts it on record"
    assert third == ("LostPeer", f"rank 2 {text}", (code, False))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(""), 2),
        (DataError("a mount that this node lacks"), 75),
        (CheckFailed(""), 3),
        (KeyError(""), 1),
        (AssertionError(""), 1),
        (Interrupted(""), 75),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 75),
        (OSError(28, "No space left on device"), 75),
    ],
)
def test_only_what_would_fail_again_ends_the_others_for_good(error: Exception, code: int):
    assert lost._code(error) == code


class _Slow:
    """A store that takes a while to give what was found."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        time.sleep(1)
        return self._store.get(key)


def _leave_at_different_times(rank: int) -> Any:
    """The store is at rank 0, which reports first; rank 1 reports later, and reads slowly; rank 2 is silent."""
    meeting = dist.distributed_c10d._get_default_store()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False, wait_for_workers=False)
    lost.LISTEN_S, lost._store = 2.0, lambda: store
    if rank == 2:
        meeting.wait(["done/0", "done/1"])
        return None
    if rank == 1:
        store.wait(["lost/0"])
        lost._store = lambda: _Slow(store)
        time.sleep(1)
    with pytest.raises(lost.LostPeer) as raised:
        lost.raise_with_lost_ranks(RuntimeError("Connection closed by peer"), HOSTS)
    meeting.set(f"done/{rank}", "")
    return raised.value.message, raised.value.writes  # and with rank 0 goes its store


@pytest.mark.slow
def test_rank_0_stays_with_its_store_until_the_others_know_who_is_silent():
    first, second, _ = run_ranks(3, _leave_at_different_times)
    assert first == ("rank 0 lost rank 2 (b), which does not answer: Connection closed by peer", True)
    assert second == ("rank 1 lost rank 2 (b), which does not answer: Connection closed by peer", False)


def _report_beside_one_that_died(rank: int) -> Any:
    """Rank 1 was the first to read for all, and was killed before it could store the reports."""
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = lost._ANSWER_S = 0.3
    if rank == 1:
        store.set("lost/1", '["", 75]')
        store.add("lost/readers/1", 1)
        store.set("reading", "")
        store.wait(["done/0", "done/2"])
        return None
    store.wait(["reading"])
    with pytest.raises(lost.LostPeer) as raised:
        lost.raise_with_lost_ranks(RuntimeError("Connection closed by peer"), HOSTS)
    store.set(f"done/{rank}", "")
    return raised.value.message.partition(":")[0], raised.value.writes


@pytest.mark.slow
def test_a_rank_that_dies_while_it_reads_for_all_does_not_put_the_blame_on_rank_0():
    first, _, third = run_ranks(3, _report_beside_one_that_died)
    assert first == ("rank 0 lost a connection, though all ranks are there", True)
    assert third == ("rank 2 lost a connection, though all ranks are there", False)


def _notice_late(rank: int) -> Any:
    """Rank 3 is silent; rank 2 reports when the others have read the reports already."""
    store = dist.distributed_c10d._get_default_store()
    lost.LISTEN_S = lost._ANSWER_S = 0.3
    if rank == 3:
        store.wait([f"done/{other}" for other in range(3)])
        return None
    if rank == 2:
        store.wait(["done/0", "done/1"])
    with pytest.raises(lost.LostPeer) as raised:
        lost.raise_with_lost_ranks(RuntimeError("Connection closed by peer"), (*HOSTS, "b"))
    store.set(f"done/{rank}", "")
    return raised.value.message.partition(":")[0], raised.value.writes


def test_a_rank_that_reports_late_does_not_name_the_others_as_silent():
    assert run_ranks(4, _notice_late)[2] == ("rank 2 lost rank 3 (b), which does not answer", False)


def test_a_rank_that_no_round_includes_reads_for_itself(monkeypatch):
    monkeypatch.setattr(lost, "LISTEN_S", 0.1)
    store = dist.HashStore()
    for other in (0, 1):
        lost._report_present(store, other)
    for number in range(1, lost._ROUNDS + 1):
        assert sorted(lost._round(store, 3, number)) == [0, 1]
    lost._report_present(store, 2)
    assert sorted(lost._collect(store, 2, 3)) == [0, 1, 2]


class _NoStore:
    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection refused")


def _lost_without_a_store(monkeypatch, error: Exception) -> lost.LostPeer:
    """Return the error that rank 2 of 3 raises for ``error`` if the store does not answer."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(lost, "_store", _NoStore)
    with pytest.raises(lost.LostPeer) as caught:
        lost.raise_with_lost_ranks(error, HOSTS)
    return caught.value


def test_without_the_store_the_host_of_rank_0_is_named(monkeypatch):
    error = _lost_without_a_store(monkeypatch, RuntimeError("Connection closed by peer"))
    assert error.message.startswith("rank 2 lost ranks 0-1 (a): the store, which is at rank 0, does not answer")
    assert (int(error.exit_code), error.writes) == (75, True)


@pytest.mark.parametrize(
    "text",
    [
        "[/src/gloo/transport/tcp/pair.cc:537] {reason}. This may indicate a possible application crash on rank 1. "
        "Check the logs of the remote worker first.\nException raised from x",
        "[/src/gloo/transport/tcp/pair.cc:538] {reason}. Check the logs of the remote worker first.",
        "{reason}. This is typically caused by a crash of another rank",
        "{reason}",
    ],
)
def test_text_that_gloo_adds_to_a_reason_is_left_out(monkeypatch, text):
    """The message keeps gloo's reason; places in gloo's sources and its advice are not in it."""
    reason = "Read error [127.0.0.1]:3495: Connection reset by peer"
    error = _lost_without_a_store(monkeypatch, RuntimeError(text.format(reason=reason)))
    assert error.message == f"rank 2 lost ranks 0-1 (a): the store, which is at rank 0, does not answer: {reason}"


def test_alone_an_error_stays_what_it_is():
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as raised:
        lost.raise_with_lost_ranks(error, ())
    assert raised.value is error
