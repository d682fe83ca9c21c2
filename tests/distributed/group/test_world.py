"""Work of rank 0 for all ranks: each gets its result or raises its error. A group of the caller has hosts too."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from smalti.base import env
from smalti.base.errors import DataError, SmaltiError
from smalti.distributed.group import world
from smalti.distributed.group.world import broadcast_from_rank0, may_leave, together


class _Unsendable(Exception):
    """Cannot be made anew from what it was pickled as."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{number} of {word}")


def _answer() -> dict[str, bytes]:
    return {"index": b"bytes"}


def _data_error() -> None:
    raise DataError("no manifest in x", allowed="a folder", hint="copy it again")


def _os_error() -> None:
    raise PermissionError(13, "Permission denied", "x")


def _unsendable() -> None:
    raise _Unsendable(3, "a kind")


def _outcome(rank: int, work: Callable[[], Any]) -> tuple[Any, int]:
    """Result or error on this rank, and how often this rank did the work."""
    calls: list[int] = []

    def counted() -> Any:
        calls.append(rank)
        return work()

    outcome: Any
    try:
        outcome = broadcast_from_rank0(counted)
    except SmaltiError as error:
        outcome = (type(error).__name__, error.message, error.allowed, error.hint)
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    return outcome, len(calls)


EXPECTED: dict[Callable[[], Any], Any] = {
    _answer: {"index": b"bytes"},
    _data_error: ("DataError", "no manifest in x", "a folder", "copy it again"),
    _os_error: ("PermissionError", "[Errno 13] Permission denied: 'x'"),
    _unsendable: ("RuntimeError", "rank 0: _Unsendable: 3 of a kind"),
}


def _outcomes(rank: int) -> list[tuple[Any, int]]:
    return [_outcome(rank, work) for work in EXPECTED]


def test_all_ranks_get_the_result_or_error_of_rank_0() -> None:
    first, second = run_ranks(2, _outcomes, timeout_s=60)
    for expected, of_first, of_second in zip(EXPECTED.values(), first, second, strict=True):
        assert (of_first, of_second) == ((expected, 1), (expected, 0))


def _fail_on_rank_1(rank: int) -> list[tuple[str, bool]]:
    def work() -> None:
        if rank == 1:
            _os_error()

    errors = []
    for raises in (lambda: together(work), _os_error):
        try:
            raises()
        except OSError as error:
            errors.append((str(error), may_leave(error)))
    return errors


def test_the_ranks_can_communicate_after_an_error_that_all_raise() -> None:
    text = "[Errno 13] Permission denied: 'x'"
    assert run_ranks(2, _fail_on_rank_1, timeout_s=60) == [[(text, True), (text, False)]] * 2


def _cause_on_rank_0(rank: int) -> list[str]:
    def work() -> None:
        try:
            _os_error()
        except OSError as error:
            raise DataError("no manifest in x") from error

    try:
        broadcast_from_rank0(work)
    except DataError as error:
        first = error.__cause__
        return [repr(first), type(first.__cause__).__name__ if first else ""]
    return []


def test_an_error_of_all_ranks_keeps_its_cause_where_it_arose() -> None:
    assert run_ranks(1, _cause_on_rank_0, timeout_s=60) == [["RaisedOnAllRanks('rank 0 failed')", "PermissionError"]]


def _join(rank: int) -> tuple[str, ...]:
    world.socket.gethostname = lambda: f"host-{rank}"
    return world.join(env.world(), torch.device("cpu"), 60.0)


def test_a_process_group_of_the_caller_has_hosts_too() -> None:
    assert run_ranks(2, _join, timeout_s=60) == [("host-0", "host-1")] * 2


def _count(rank: int) -> list[tuple[int, int]]:
    """Return what is counted, over all groups and of the first, after a collective of training and one of a saver."""
    background = world.background_group(timedelta(seconds=30))
    counts = []
    for group in (None, background):
        dist.barrier(group=group)
        counts.append((world.count_collectives(), len(world.collectives_by_group())))
    return counts


def test_collectives_of_a_thread_beside_training_are_not_counted() -> None:
    for (trained, groups), (saved, groups_then) in run_ranks(2, _count, timeout_s=60):
        assert trained > 0
        assert (saved, groups_then) == (trained, groups)
