"""How many collectives of each process group a rank has started, asked for while the rank may wait in one.

A thread of the rank sleeps in the read of a named pipe. Only a request wakes it, so it costs nothing and is no sign of
life: a rank that holds the GIL gives no answer.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from smalti.base import store
from smalti.base.errors import SmaltiError

_POLL_S = 0.02

Counts = dict[str, int]
"""Name of a process group, the same on all its ranks -> collectives that this rank has started in it."""


def _pipe(log_folder: Path, rank: int) -> Path:
    return log_folder / f"collectives-{rank:03d}.pipe"


def _answer(log_folder: Path, rank: int) -> Path:
    return log_folder / f"collectives-{rank:03d}.json"


def answer_requests(log_folder: Path, rank: int, counts: Callable[[], Counts]) -> None:
    """Answer the requests of ``ask`` from now on; where the file system has no named pipes, none is answered."""
    path = _pipe(log_folder, rank)
    with suppress(OSError):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # with a writer of its own a read waits and never ends
        arguments = pipe, _answer(log_folder, rank), counts
        threading.Thread(target=_answer_each, args=arguments, name="smalti-collectives", daemon=True).start()


def _answer_each(pipe: int, path: Path, counts: Callable[[], Counts]) -> None:
    while os.read(pipe, 1):
        with suppress(OSError, SmaltiError, RuntimeError):  # no answer
            store.write_json(path, counts())


def ask(log_folder: Path, ranks: Sequence[int], wait_s: float) -> dict[int, Counts]:
    """Return the counts of the ranks that answer within ``wait_s``, by rank."""
    for rank in ranks:
        _answer(log_folder, rank).unlink(missing_ok=True)
        with suppress(OSError):  # it has not begun to answer, or is gone
            pipe = os.open(_pipe(log_folder, rank), os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"?")
            os.close(pipe)
    end_s = time.monotonic() + wait_s
    while not (done := all(_answer(log_folder, rank).exists() for rank in ranks)) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    answered = ranks if done else [rank for rank in ranks if _answer(log_folder, rank).exists()]
    return {rank: store.read_json(_answer(log_folder, rank)) for rank in answered}


def behind(counts: dict[int, Counts]) -> list[int]:
    """Return the ranks that have started fewer collectives than others of the same group; [] where none has.

    Ranks that wait in two groups are each behind in the group of the other. The group with the most collectives
    decides: it is the one that the program uses in every step.
    """
    most: Counts = {}
    for of_rank in counts.values():
        for group, count in of_rank.items():
            most[group] = max(count, most.get(group, 0))
    for group in sorted(most, key=lambda name: (-most[name], name)):
        members = {rank: of_rank[group] for rank, of_rank in counts.items() if group in of_rank}
        least = min(members.values())
        if least < most[group]:
            return [rank for rank, count in members.items() if count == least]
    return []
