"""Names the ranks that do not answer when a collective fails.

An error of torch's libraries that means a lost or silent peer becomes a LostPeer, which names the ranks that did not
answer with their hosts, after some seconds. Every other error is raised as it is; the other ranks get its text, and its
exit code where it would occur again. A rank that is cut off from the store can only name the ranks on the host of the
store. A rank may ask some seconds after the others, or die while it asks. Which of several silent ranks was the first
is not known; one that asks late may have been named as silent before.
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
Said = dict[int, tuple[str, int]]
"""Rank -> why it ended by itself and with which exit code; "" where it too has lost somebody."""

LISTEN_S = 5.0
"""How long the ranks that are left wait for each other to say so."""
_ANSWER_S = 3.0
"""A store that takes longer than this to answer is behind a cut line."""
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
"""What gloo, NCCL and torch's store say when the other side is gone or silent. Their names alone say nothing: a
collective that our own ranks enter with unequal tensors is reported by the same libraries, and is a bug."""


class LostPeer(RetryableError):
    """This rank cannot go on, because another one is gone or silent. Where that one has said that it would fail again,
    ``exit_code`` is what it ends with."""

    writes = False
    """Whether this rank, of all that are left, is to put the end on record."""


def lost_peer(error: BaseException) -> bool:
    """True where a library's error means that another rank is gone or silent, and not that ours did wrong."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def raise_with_lost_ranks(error: Exception, hosts: Sequence[str], *, ask: bool = True) -> NoReturn:
    """Raise ``error``; in a world of several ranks, where it means a lost peer, as LostPeer with the silent ones named.

    Call it before the world is left. hosts: of each rank. ask: False where the launcher knows who has died.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise error
    rank, store = dist.get_rank(), _store()
    if not lost_peer(error):
        report = json.dumps([f"{type(error).__name__}: {error}"[:500], _code(error)])
        with suppress(RuntimeError):
            _within(_ANSWER_S, lambda: store.set(f"lost/{rank}", report))
        raise error
    said = _ask(store, rank) if ask else {}
    who = _silent(said, rank, hosts) if ask else "another rank"
    reason = _ABOUT.sub("", str(error).strip().splitlines()[0])[:300]
    again = "run the same command again; it goes on from the newest checkpoint"
    codes = [code for text, code in (said or {}).values() if text and code != ExitCode.RETRY]
    lost = LostPeer(
        f"rank {rank} lost {who}: {reason}",
        hint="fix what that rank reports; the same command would end in the same way" if codes else again,
    )
    if codes:
        lost.exit_code = ExitCode(codes[0])
    # Those that are cut off from the store get no report of each other, but know that rank 0 may be gone.
    left = [one for one, (text, _) in said.items() if not text] if said else _beside_first(hosts)
    lost.writes = ask and rank == min(left, default=rank)
    raise lost from error


def _code(error: Exception) -> ExitCode:
    """What the others are to end with: 75, unless the same command would surely fail here again. An error of torch, the
    system or memory may be one of this device, driver or disk, and another try may find a better one; and so may a file
    that this rank does not find, or finds damaged."""
    if isinstance(error, DataError):
        return ExitCode.RETRY
    if isinstance(error, SmaltiError):
        return error.exit_code if error.exit_code in _SURE else ExitCode.RETRY
    return ExitCode.RETRY if isinstance(error, (RuntimeError, OSError, MemoryError)) else ExitCode.BUG


def _beside_first(hosts: Sequence[str]) -> list[int]:
    """The ranks that are not on the host of rank 0."""
    return [rank for rank, host in enumerate(hosts) if host != hosts[0]] or list(range(1, len(hosts)))


def _ask(store: dist.Store, rank: int) -> Said | None:
    """What the ranks have said within some seconds; None where the store itself does not answer."""
    with suppress(ValueError):  # not the main thread
        # A launcher that sees the first rank end stops the others, which would then name nobody.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    size, seconds = dist.get_world_size(), LISTEN_S + _ANSWER_S
    if not _within(seconds, lambda: _come(store, rank)):
        return None
    said = _within((_ROUNDS + 1) * seconds, lambda: _listen(store, rank, size))
    if said is not None and rank == 0:  # the store is gone with this rank: the others are to have read it
        keys = [f"lost/heard/{other}" for other, (text, _) in said.items() if not text]
        _within(_ANSWER_S, lambda: _wait(lambda: store.check(keys), _ANSWER_S))
    return said


def _come(store: dist.Store, rank: int) -> bool:
    """Say that this rank is there; True once the store has it."""
    store.set(f"lost/{rank}", json.dumps(["", ExitCode.RETRY]))
    return store.check([f"lost/{rank}"])


def _listen(store: dist.Store, rank: int, size: int) -> Said:
    """What a round has found that knows of this rank. One that is not in the list has come after that round, and a
    round without a list has lost the rank that looked: both ask in the next. After the last, each looks for itself."""
    for number in range(1, _ROUNDS + 1):
        said = _round(store, size, number)
        if rank in said:
            break
    else:
        said = _look(store, size, 0)
    store.set(f"lost/heard/{rank}", "")
    return said


def _round(store: dist.Store, size: int, number: int) -> Said:
    """One of those that ask looks for all of them: each for itself, thousands would ask the store for minutes. Empty
    where that one did not come back."""
    key = f"lost/said/{number}"
    if store.add(f"lost/asking/{number}", 1) == 1:
        reports = _look(store, size, LISTEN_S)
        store.set(key, json.dumps(list(reports.items())))
        return reports
    with suppress(RuntimeError):  # that it did not come in time; where the store is gone, the next call says so
        store.wait([key], timedelta(seconds=LISTEN_S + _ANSWER_S))
    if not store.check([key]):
        return {}
    return {int(other): (str(text), int(code)) for other, (text, code) in json.loads(store.get(key))}


def _look(store: dist.Store, size: int, seconds: float) -> Said:
    """What every rank has said, once all have or some seconds have passed."""
    missing = set(range(size))
    reports = Said()

    def all_here() -> bool:
        arrived = {other for other in missing if store.check([f"lost/{other}"])}
        missing.difference_update(arrived)
        for other in arrived:
            text, code = json.loads(store.get(f"lost/{other}"))
            reports[other] = (str(text), int(code))
        return not missing

    _wait(all_here, seconds)
    return reports


def _silent(said: Said | None, rank: int, hosts: Sequence[str]) -> str:
    """Who has not said that it is still there, or has said that it ends."""
    size = dist.get_world_size()
    if said is None:
        first = [other for other in range(size) if hosts and hosts[other] == hosts[0]] or [0]
        return f"{names_of(first, hosts)}: the store, which is at rank 0, does not answer"
    ended = {other: text for other, (text, _) in said.items() if text}
    if ended:
        return "; ".join(f"{names_of([other], hosts)}, which ended with {text}" for other, text in ended.items())
    silent = set(range(size)) - set(said)
    if not silent:
        return "a connection, though all ranks are there"
    return f"{names_of(silent, hosts)}, which {'does' if len(silent) == 1 else 'do'} not answer"


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    """Until ``ready``, or some seconds have passed."""
    end_s = time.monotonic() + seconds
    while not ready() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """What ``work`` gives, or None where it takes longer or fails: a store behind a cut line never answers."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
