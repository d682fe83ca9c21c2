"""The agent names ranks that do not answer, and not those that ended because they waited for them."""

import pytest
from test_fleet_agent import pids, run


def _unresponsive(folder) -> list[tuple[int, bool]]:
    events = [event for event in folder.events() if event["event"] == "rank_unresponsive"]
    return [(event["rank"], event["stopped"]) for event in events]


WAITS = """
def wait(state, *ranks):
    for rank in ranks:
        while True:
            try:
                pid = int(open(f"{folder}/pid-{rank}").read())
                if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in state:
                    break
            except (OSError, ValueError):
                pass
            time.sleep(0.01)
"""
"""Code with which a rank waits until others are stopped (state T)."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (3, 1)])
def test_a_stopped_rank_is_named_and_not_those_that_waited_for_it(tmp_path, ranks, victim):
    body = f"if rank == {victim}: os.kill(os.getpid(), signal.SIGSTOP)\nwait('T', {victim})\nsys.exit(76)"
    outcome, folder = run(tmp_path, WAITS + body, ranks=ranks)
    who = f"rank {victim} (pid {pids(tmp_path, ranks)[victim]})"
    assert outcome.code == 75
    assert outcome.reason == f"{who}, which was stopped (SIGSTOP or a debugger), did not answer after step 0"
    assert folder.status()["reason"] == outcome.reason
    assert _unresponsive(folder) == [(victim, True)]
    assert not [event for event in folder.events() if event["event"] == "rank_died"]
    assert folder.events()[-1]["codes"] == [-9 if rank == victim else 75 for rank in range(ranks)]


@pytest.mark.slow
def test_ranks_that_hang_are_named_without_those_that_waited_for_them(tmp_path):
    body = """
if rank in (1, 2): time.sleep(60)
while not all(os.path.exists(f"{folder}/pid-{one}") for one in range(4)): time.sleep(0.01)
sys.exit(76)
"""
    outcome, folder = run(tmp_path, body, ranks=4, grace_s=2.0)
    first, second = pids(tmp_path, 4)[1:3]
    assert outcome.reason == f"rank 1 (pid {first}), rank 2 (pid {second}) did not answer after step 0"
    assert _unresponsive(folder) == [(1, False), (2, False)]


@pytest.mark.slow
def test_a_killed_rank_is_the_cause_and_a_stopped_one_beside_it_is_named(tmp_path):
    body = """
if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
wait("T", 0)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(76)
"""
    outcome, folder = run(tmp_path, WAITS + body, ranks=3)
    stopped, killed, _ = (f"rank {rank} (pid {pid})" for rank, pid in enumerate(pids(tmp_path, 3)))
    assert outcome.reason == (
        f"{killed} was killed by SIGKILL after step 0; "
        f"{stopped}, which was stopped (SIGSTOP or a debugger), did not answer either"
    )
    assert _unresponsive(folder) == [(0, True)]
    assert [event["rank"] for event in folder.events() if event["event"] == "rank_died"] == [1]
