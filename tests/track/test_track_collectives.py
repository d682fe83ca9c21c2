"""Counts of collectives that a rank gives to the agent, and who is behind by them."""

import os
import subprocess
import sys

import pytest

from smalti.track import collectives
from smalti.track.collectives import behind

ANSWERS = """
import sys, time
from smalti.track import collectives
def counts():
    if sys.argv[2] == "late":
        time.sleep(60)
    return {"0": 7}
collectives.answer_requests(sys.argv[1], counts)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets")
def test_ranks_answer_while_their_main_thread_waits_and_others_are_left_out() -> None:
    command = [sys.executable, "-c", ANSWERS]
    nonces = {number: f"{os.getpid()}-{number}" for number in range(3)}
    ranks = [
        subprocess.Popen([*command, nonces[number], how], stdout=subprocess.PIPE)
        for number, how in enumerate(("now", "late", "now"))
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
        assert collectives.ask({0: nonces[0], 2: nonces[2]}, 30) == {0: {"0": 7}, 2: {"0": 7}}
        ranks[2].kill()
        ranks[2].wait()
        assert collectives.ask(nonces, 1.0) == {0: {"0": 7}}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("counts", "ranks"),
    [
        ({0: {"0": 5}, 1: {"0": 5}}, []),
        ({0: {"0": 5}, 1: {"0": 4}, 2: {"0": 5}}, [1]),
        ({0: {"0": 9, "c": 0}, 1: {"0": 8, "c": 1}}, [1]),
        ({0: {"0": 9, "a": 3}, 1: {"0": 9, "a": 3}, 2: {"0": 9, "b": 2}, 3: {"0": 9, "b": 3}}, [2]),
        # rank 3 lacks a collective of its tensor group; rank 2 waits for it there and is missed in its data group
        (
            {
                0: {"t0": 101, "d0": 501},
                1: {"t0": 101, "d1": 501},
                2: {"t1": 101, "d0": 500},
                3: {"t1": 100, "d1": 500},
            },
            [3],
        ),
        ({0: {}, 1: {}}, []),
        ({}, []),
    ],
)
def test_ranks_with_fewer_collectives_are_behind(counts: dict[int, dict[str, int]], ranks: list[int]) -> None:
    assert behind(counts) == ranks
