"""Names the ranks that do not answer when a collective fails.

Each rank that is left reports to the store that it is present, or which error it ended with; the ranks without a report
are the silent ones. Which of several silent ranks was the first is not known.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist

from smalti.base.errors import DataError, ExitCode, RetryableError, SmaltiError
from smalti.distributed.group.handshake import names_of

T = TypeVar("T")
Reports = dict[int, tuple[str, int]]
"""Rank -> the error that it ended with and its exit code; the text is "" where it too has lost another rank."""

LISTEN_S = 5.0
"""How long the ranks that are left wait for the reports of each other."""
_ANSWER_S = 3.0
"""A store that takes longer than this to answer cannot be reached."""
_POLL_S = 0.1
_ROUNDS = 2
_SURE = (ExitCode.BUG, ExitCode.USAGE, ExitCode.CHECK_FAILED)
_ABOUT = re.compile(r"^\[\S+:\d+\] |\.? (This (may indicate|is typically caused)|Check the logs of the remote) .*$")
"""Text that gloo adds to a reason: a place in its sources, and advice."""
_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|closed by peer|timed? ?out"
    r"|ncclRemoteError|communicator was aborted|no route to host|network is unreachable|recvBytes|sendBytes",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store when the other side is gone or silent. An error of these libraries is not
enough: a collective that our own ranks enter with unequal tensors is reported by them too, and is a bug."""


class LostPeer(RetryableError):
    """This rank cannot continue, because another one is gone or silent.

    ``exit_code`` is that of the other rank where it has reported an error that would occur again.
    """

    writes = False
    """True on one of the ranks that are left: the one that records the end of the attempt."""


def lost_peer(error: BaseException) -> bool:
    """Return whether a library's error means that another rank is gone or silent, and not that ours has a bug."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def raise_with_lost_ranks(error: Exception, hosts: Sequence[str], *, find_silent: bool = True) -> NoReturn:
    """Raise ``error``; in a world of several ranks, where it means a lost peer, as LostPeer with the silent ones named.

    That takes some seconds, in the process group, which must still exist. Every other error is raised as it is; the
    other ranks get its text, and its exit code where it would occur again. A rank that cannot reach the store names
    the ranks on the host of the store. A rank that reports seconds after the others may have been named as silent.

    hosts: of each rank. find_silent: False where the launcher knows which rank has died.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise error
    if find_silent:  # a launcher that sees the first rank end stops the others, which have not recorded the reason yet
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, store = dist.get_rank(), _store()
    if not lost_peer(error):
        report = json.dumps([f"{type(error).__name__}: {error}"[:500], _code(error)])
        with suppress(RuntimeError):
            _within(_ANSWER_S, lambda: store.set(f"lost/{rank}", report))
        raise error
    reports = _exchange_reports(store, rank) if find_silent else {}
    who = _describe_lost(reports, hosts) if find_silent else "another rank"
    reason = _ABOUT.sub("", str(error).strip().splitlines()[0])[:300]
    again = "run the same command again; it continues from the newest checkpoint"
    codes = [code for text, code in (reports or {}).values() if text and code != ExitCode.RETRY]
    lost = LostPeer(
        f"rank {rank} lost {who}: {reason}",
        hint="fix what that rank reports; the same command would end in the same way" if codes else again,
    )
    if codes:
        lost.exit_code = ExitCode(codes[0])
    # Ranks that cannot reach the store have no reports of each other, but know that rank 0 may be gone.
    left = [other for other, (text, _) in reports.items() if not text] if reports else _ranks_off_host_of_rank0(hosts)
    lost.writes = find_silent and rank == min(left, default=rank)
    raise lost from error


def _code(error: Exception) -> ExitCode:
    """Return the exit code for the other ranks: 75, unless the same command would surely fail again.

    Errors of torch, the system or memory may be due to this device, driver or disk, and a file that is missing or
    damaged to this host; another attempt may run elsewhere.
    """
    if isinstance(error, DataError):
        return ExitCode.RETRY
    if isinstance(error, SmaltiError):
        return error.exit_code if error.exit_code in _SURE else ExitCode.RETRY
    return ExitCode.RETRY if isinstance(error, (RuntimeError, OSError, MemoryError)) else ExitCode.BUG


def _ranks_off_host_of_rank0(hosts: Sequence[str]) -> list[int]:
    """Return the ranks that are not on the host of rank 0; if all are, all but rank 0."""
    return [rank for rank, host in enumerate(hosts) if host != hosts[0]] or list(range(1, len(hosts)))


def _exchange_reports(store: dist.Store, rank: int) -> Reports | None:
    """Return the reports of the ranks after some seconds; None where the store itself does not answer."""
    size, seconds = dist.get_world_size(), LISTEN_S + _ANSWER_S
    if not _within(seconds, lambda: _report_present(store, rank)):
        return None
    reports = _within((_ROUNDS + 1) * seconds, lambda: _collect(store, rank, size))
    if reports is not None and rank == 0:  # the store ends with this rank, so the others must have read it before
        keys = [f"lost/done/{other}" for other, (text, _) in reports.items() if not text]
        _within(_ANSWER_S, lambda: _wait(lambda: store.check(keys), _ANSWER_S))
    return reports


def _report_present(store: dist.Store, rank: int) -> bool:
    """Report that this rank is present; True once the store has the report."""
    store.set(f"lost/{rank}", json.dumps(["", ExitCode.RETRY]))
    return store.check([f"lost/{rank}"])


def _collect(store: dist.Store, rank: int, size: int) -> Reports:
    """Return the reports of the first round that includes this rank.

    A rank that is missing in a round has reported after it; a round without any report has lost the rank that read for
    all. Both take part in the next round. After the last one each rank reads the reports itself.
    """
    for number in range(1, _ROUNDS + 1):
        reports = _round(store, size, number)
        if rank in reports:
            break
    else:
        reports = _read_reports(store, size, 0)
    store.set(f"lost/done/{rank}", "")
    return reports


def _round(store: dist.Store, size: int, number: int) -> Reports:
    """Have one rank read the reports for all: if each did, thousands of ranks would query the store for minutes.

    Empty where that rank was lost meanwhile.
    """
    key = f"lost/reports/{number}"
    if store.add(f"lost/readers/{number}", 1) == 1:
        reports = _read_reports(store, size, LISTEN_S)
        store.set(key, json.dumps(list(reports.items())))
        return reports
    with suppress(RuntimeError):  # a timeout; if the store is gone, the next call raises
        store.wait([key], timedelta(seconds=LISTEN_S + _ANSWER_S))
    if not store.check([key]):
        return {}
    return {int(other): (str(text), int(code)) for other, (text, code) in json.loads(store.get(key))}


def _read_reports(store: dist.Store, size: int, seconds: float) -> Reports:
    """Return the reports that exist once all ranks have reported, or after ``seconds``."""
    missing = set(range(size))
    reports = Reports()

    def complete() -> bool:
        arrived = {other for other in missing if store.check([f"lost/{other}"])}
        missing.difference_update(arrived)
        for other in arrived:
            text, code = json.loads(store.get(f"lost/{other}"))
            reports[other] = (str(text), int(code))
        return not missing

    _wait(complete, seconds)
    return reports


def _describe_lost(reports: Reports | None, hosts: Sequence[str]) -> str:
    """Name the ranks that have reported an error; if none has, those without a report."""
    size = dist.get_world_size()
    if reports is None:
        first = [other for other in range(size) if hosts and hosts[other] == hosts[0]] or [0]
        return f"{names_of(first, hosts)}: the store, which is at rank 0, does not answer"
    ended = {other: text for other, (text, _) in reports.items() if text}
    if ended:
        return "; ".join(f"{names_of([other], hosts)}, which ended with {text}" for other, text in ended.items())
    silent = set(range(size)) - set(reports)
    if not silent:
        return "a connection, though all ranks are there"
    return f"{names_of(silent, hosts)}, which {'does' if len(silent) == 1 else 'do'} not answer"


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    """Wait until ``ready``, or until some seconds have passed."""
    end_s = time.monotonic() + seconds
    while not ready() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of ``work``, or None where it takes longer or fails: a store out of reach never answers."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
