"""How many collectives of each process group a rank has started, asked for while the rank may wait in one.

A thread of the rank sleeps in the read of a socket, and only a request wakes it. It costs nothing and is no sign of
life: a rank that holds the GIL gives no answer. The sockets are of Linux's abstract kind, without files, and end with
their process. They are named by a random nonce, because containers that share a network may have equal process ids. On
other systems there is no answer.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

_MOST_BYTES = 65_536

Counts = dict[str, int]
"""Name of a process group, the same on all its ranks -> collectives that this rank has started in it."""


def _address(nonce: str) -> str:
    return f"\0smalti-collectives-{nonce}"


def answer_requests(nonce: str, counts: Callable[[], Counts]) -> None:
    """Answer the requests of ``ask`` with this nonce from now on."""
    with suppress(OSError):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        server.bind(_address(nonce))
        threading.Thread(target=_answer_each, args=(server, counts), name="smalti-collectives", daemon=True).start()


def _answer_each(server: socket.socket, counts: Callable[[], Counts]) -> None:
    while True:
        _, asker = server.recvfrom(1)
        with suppress(OSError, RuntimeError):  # no answer
            server.sendto(json.dumps(counts()).encode(), asker)


def ask(nonces: Mapping[int, str], wait_s: float) -> dict[int, Counts]:
    """Return the counts of the ranks that answer within ``wait_s``, by rank. nonces: of each rank."""
    answers: dict[int, Counts] = {}
    ranks: dict[str | bytes, int] = {_address(nonce).encode(): rank for rank, nonce in nonces.items()}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
        asker.bind(_address(secrets.token_hex(8)))
        for nonce in nonces.values():
            with suppress(OSError):  # it has not begun to answer, or is gone
                asker.sendto(b"?", socket.MSG_DONTWAIT, _address(nonce))
        end_s = time.monotonic() + wait_s
        while len(answers) < len(nonces) and (left_s := end_s - time.monotonic()) > 0:
            asker.settimeout(left_s)
            text, sender = asker.recvfrom(_MOST_BYTES)
            if sender in ranks:
                with suppress(ValueError):  # cut off, or of another program
                    answers[ranks[sender]] = json.loads(text)
    return answers


def behind(counts: Mapping[int, Counts]) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody, by the collectives of each group; [] if none.

    A rank waits for those that have started fewer collectives of a group. Where each waits for another, as two ranks do
    in two groups, the group with the most collectives decides: it is the one that the program uses in every step.
    """
    groups: dict[str, dict[int, int]] = {}
    for rank, of_rank in counts.items():
        for group, count in of_rank.items():
            groups.setdefault(group, {})[rank] = count
    late = {name: of for name, of in groups.items() if min(of.values()) < max(of.values())}
    waiting = {rank for of in late.values() for rank, count in of.items() if count > min(of.values())}
    awaited = {rank for of in late.values() for rank, count in of.items() if count < max(of.values())}
    if awaited - waiting or not late:
        return sorted(awaited - waiting)
    members = late[min(late, key=lambda name: (-max(late[name].values()), name))]
    return sorted(rank for rank, count in members.items() if count == min(members.values()))
