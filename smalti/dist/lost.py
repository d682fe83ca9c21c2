"""When a rank loses the others in the middle of a collective: who is it that does not answer?

Promises: an error of torch's libraries that means a lost or silent peer becomes a LostPeer that names the ranks that
did not answer, with their hosts, some seconds after it was noticed; every other error stays what it is, and the others
are told of it. A rank that is cut off from the store can only name the ranks on the host of the store. Does not promise
which of several silent ranks was the first.
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch.distributed as dist

from smalti.base.errors import TryElsewhere
from smalti.dist.handshake import names_of

T = TypeVar("T")

LISTEN_S = 5.0
"""How long the ranks that are left wait for each other to say so."""
_ANSWER_S = 3.0
"""A store that takes longer than this to answer is behind a cut line."""
_POLL_S = 0.1
_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|closed by peer|timed? ?out"
    r"|ncclRemoteError|communicator was aborted|no route to host|network is unreachable|recvBytes|sendBytes",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say when the other side is gone or silent. Their names alone say nothing: a
collective that our own ranks enter with unequal tensors is reported by the same libraries, and is a bug."""


class LostPeer(TryElsewhere):
    """This rank cannot go on, because another one is gone or silent."""


def lost_peer(error: BaseException) -> bool:
    """True where a library's error means that another rank is gone or silent, and not that ours did wrong."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def raise_told(error: Exception, hosts: Sequence[str], *, ask: bool = True) -> NoReturn:
    """Raise ``error``; in a world of several ranks, where it means a lost peer, as LostPeer with the silent ones named.

    Call it before the world is left. hosts: of each rank. ask: False where the launcher knows who has died.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise error
    rank, store = dist.get_rank(), _store()
    if not lost_peer(error):
        with suppress(RuntimeError):
            _within(_ANSWER_S, lambda: store.set(f"lost/{rank}", f"{type(error).__name__}: {error}"[:500]))
        raise error
    who = _silent(store, rank, hosts) if ask else "another rank"
    reason = str(error).strip().splitlines()[0][:300]
    raise LostPeer(
        f"rank {rank} lost {who}: {reason}", hint="run the same command again; it goes on from the newest checkpoint"
    ) from error


def _silent(store: dist.Store, rank: int, hosts: Sequence[str]) -> str:
    """Who has not said within some seconds that it is still there."""
    with suppress(ValueError):  # not the main thread
        # A launcher that sees the first of us end tells the others to go, who would then name nobody.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    size = dist.get_world_size()
    said = _within(LISTEN_S + _ANSWER_S, lambda: _listen(store, rank, size))
    if said is None:
        first = [other for other in range(size) if hosts and hosts[other] == hosts[0]] or [0]
        return f"{names_of(first, hosts)}: the store, which is at rank 0, does not answer"
    ended = {other: text for other, text in said.items() if text}
    if ended:
        return "; ".join(f"{names_of([other], hosts)}, which ended with {text}" for other, text in ended.items())
    silent = set(range(size)) - set(said)
    if not silent:
        return "a connection, though all ranks are there"
    return f"{names_of(silent, hosts)}, which {'does' if len(silent) == 1 else 'do'} not answer"


def _listen(store: dist.Store, rank: int, size: int) -> dict[int, str]:
    """Ranks that have said something -> why they ended; nothing where they too have lost somebody."""
    store.set(f"lost/{rank}", "")
    end_s, here = time.monotonic() + LISTEN_S, {rank}
    while len(here) < size and time.monotonic() < end_s:
        here |= {other for other in range(size) if other not in here and store.check([f"lost/{other}"])}
        time.sleep(_POLL_S)
    return {other: store.get(f"lost/{other}").decode() for other in here}


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """What ``work`` gives, or None where it takes longer or fails: a store behind a cut line never answers."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
