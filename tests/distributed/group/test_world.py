"""What rank 0 does for all: everybody gets its answer, or raises what it raised; nobody waits for ever."""

from collections.abc import Callable
from typing import Any

from gloo_ranks import run_ranks

from smalti.base.errors import DataError, SmaltiError
from smalti.distributed.group.world import broadcast_from_rank0


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


def _told(rank: int, work: Callable[[], Any]) -> tuple[Any, int]:
    """What came of it on this rank, and how often this rank did the work."""
    calls: list[int] = []

    def counted() -> Any:
        calls.append(rank)
        return work()

    found: Any
    try:
        found = broadcast_from_rank0(counted)
    except SmaltiError as error:
        found = (type(error).__name__, error.message, error.allowed, error.hint)
    except Exception as error:
        found = (type(error).__name__, str(error))
    return found, len(calls)


EXPECTED: dict[Callable[[], Any], Any] = {
    _answer: {"index": b"bytes"},
    _data_error: ("DataError", "no manifest in x", "a folder", "copy it again"),
    _os_error: ("PermissionError", "[Errno 13] Permission denied: 'x'"),
    _unsendable: ("RuntimeError", "rank 0: _Unsendable: 3 of a kind"),
}


def _each_told(rank: int) -> list[tuple[Any, int]]:
    return [_told(rank, work) for work in EXPECTED]


def test_all_ranks_get_what_the_first_one_found() -> None:
    first, second = run_ranks(2, _each_told, timeout_s=60)
    for expected, of_first, of_second in zip(EXPECTED.values(), first, second, strict=True):
        assert (of_first, of_second) == ((expected, 1), (expected, 0))
