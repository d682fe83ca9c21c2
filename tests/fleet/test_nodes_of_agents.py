"""Agents of several nodes with small children in place of training: who is named, what follows, that nobody stays."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_fleet_agent import is_alive, pids, script
from test_fleet_agent import wait_for as wait_for_files
from test_restarts import HEAD as AGAIN

from smalti.base.errors import UserError
from smalti.config.nodes import NodesConfig
from smalti.config.restart import RestartConfig
from smalti.fleet import agent
from smalti.fleet.neighbour import stream
from smalti.fleet.nodes import joined, lead
from smalti.track.run import RunFolder

pytestmark = pytest.mark.slow  # processes

KEY = "a key"
HEAD = (
    AGAIN
    + """
world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
def put(name, text):
    with open(f"{folder}/.{name}-{rank}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/.{name}-{rank}", f"{folder}/{name}-{rank}")
put("pid", str(os.getpid()))
"""
)
"""As in test_restarts, and each rank writes its process id."""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_PEER_KEY", KEY)


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 200
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def wait_for(*paths: Path) -> None:
    wait_for_files(*paths, seconds=200)


class Cluster:
    """The lead in this process, and ``smalti fleet join`` as other nodes, all on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.joined: dict[str, subprocess.Popen[str]] = {}

    def join(self, name: str, *options: str, **variables: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "smalti", "fleet", "join", self.address, "--name", name, *options]
        self.joined[name] = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=self.root, start_new_session=True,
        )  # fmt: skip
        return self.joined[name]

    def output(self, name: str) -> str:
        """What a node has printed at its end."""
        return self.joined[name].communicate(timeout=200)[0]

    def run(
        self,
        body: str,
        *,
        ranks: int = 4,
        count: int = 2,
        spares: int = 0,
        lease: str = "20s",
        rejoin_s: float = 200.0,
        **restart: Any,
    ) -> tuple[agent.Outcome, list[agent.Outcome], RunFolder]:
        """Run attempts until the run ends: the outcome, that of each attempt, and the run folder."""
        command = [sys.executable, script(self.root, body, HEAD), str(self.root)]
        outcomes: list[agent.Outcome] = []

        def opened(attempt: int) -> RunFolder:
            folder = RunFolder.join(self.root, attempt)
            folder.log_folder().mkdir(parents=True)
            return folder

        config = NodesConfig(count=count, listen=self.address, lease=lease, wait="200s")
        with lead.opened(config, ranks=ranks, run="toy") as nodes:
            assert nodes is not None
            assert nodes.wait(ranks) == ranks
            wait_until(lambda: len(nodes._usable()) >= count - 1 + spares)
            nodes._wait_s = rejoin_s
            outcome = agent.run(
                command, ranks=ranks, folder=opened(0), threads=1, grace_s=0.5, at_end=outcomes.append,
                again=lambda _: (command, opened(len(outcomes))), restart=RestartConfig(**restart),
                fits=nodes.divides, nodes=nodes,
            )  # fmt: skip
            nodes.end(outcome.code)
        return outcome, outcomes, RunFolder.join(self.root, 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for process in made.joined.values():
        process.kill()
        process.communicate()


def events(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in folder.events() if event["event"] == kind]


def later(do: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def test_the_ranks_of_two_nodes_know_their_places_and_a_spare_waits(cluster: Cluster) -> None:
    for name in ("n2", "n3"):
        cluster.join(name, "--once")
    body = """
    keys = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR SMALTI_ATTEMPT"
    put("place", " ".join([*(os.environ[key] for key in keys.split()), str(os.getppid())]))
    print("rank", rank, "writes a log", flush=True)
    """
    outcome, _, folder = cluster.run(body, spares=1)
    assert outcome.code == 0
    places = [(cluster.root / f"place-{rank}").read_text().split() for rank in range(4)]
    assert [place[:-1] for place in places] == [
        [str(rank), str(rank % 2), "4", "2", "127.0.0.1", "0"] for rank in range(4)
    ]
    (started,) = events(folder, "attempt_started")
    first, second = started["nodes"]
    assert first == os.uname().nodename
    assert [int(place[-1]) for place in places] == [os.getpid()] * 2 + [cluster.joined[second].pid] * 2
    assert folder.rank_log(3).read_text() == "rank 3 writes a log\n"
    for name in ("n2", "n3"):
        assert "has joined toy" in cluster.output(name)
        assert cluster.joined[name].returncode == 0, "the exit code of the run"


def test_a_rank_that_dies_on_another_node_is_named_with_it(cluster: Cluster) -> None:
    cluster.join("n2")
    body = """
    if not attempt and rank == 3:
        print("before the end", flush=True)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600 if not attempt else 0)
    """
    outcome, outcomes, folder = cluster.run(body)
    assert (outcome.code, len(outcomes)) == (0, 2)
    (died,) = events(folder, "rank_died")
    assert (died["rank"], died["node"], died["signal"]) == (3, "n2", "SIGKILL")
    assert outcomes[0].reason == f"rank 3 (pid {died['pid']} on n2) was killed by SIGKILL after step 0"
    assert outcomes[0].details == ("before the end",)


def test_a_spare_takes_the_place_of_a_node_that_is_lost(cluster: Cluster) -> None:
    for name in ("n2", "n3"):
        cluster.join(name)
    body = """
    put(f"parent-{attempt}", str(os.getppid()))
    time.sleep(600 if not attempt else 0)
    """

    def kill() -> None:
        wait_for(cluster.root / "parent-0-2", cluster.root / "parent-0-0")
        os.kill(int((cluster.root / "parent-0-2").read_text()), signal.SIGKILL)

    later(kill)
    outcome, outcomes, folder = cluster.run(body, spares=1)
    assert (outcome.code, len(outcomes)) == (0, 2)
    (lost,) = events(folder, "node_lost")
    first, second = (event["nodes"][1] for event in events(folder, "attempt_started"))
    assert {first, second} == {"n2", "n3"}
    assert (lost["node"], lost["ranks"]) == (first, [2, 3])
    assert lost["detected_s"] < 20, "its connection was closed"
    assert (outcomes[0].cause, outcomes[0].rank) == ("node", None)
    assert outcomes[0].reason.startswith(f"node {first} was lost after step 0: its agent ended")
    assert not any(is_alive(pid) for pid in pids(cluster.root, 4))


def test_without_a_spare_it_goes_on_with_fewer_ranks_and_grows_when_the_node_is_back(cluster: Cluster) -> None:
    cluster.join("n2")
    body = """
    def leave(number, frame):
        os._exit(75)
    signal.signal(signal.SIGTERM, leave)
    put(f"world-{attempt}", str(world))
    time.sleep(600 if attempt < 2 else 0)
    """

    def kill_and_come_back() -> None:
        wait_for(*(cluster.root / f"world-0-{rank}" for rank in range(4)))
        cluster.joined["n2"].kill()
        cluster.output("n2")
        wait_for(cluster.root / "world-1-0")
        cluster.join("n2")

    later(kill_and_come_back)
    outcome, outcomes, folder = cluster.run(body, lease="5s", min_ranks=1, grow_after="1s")
    assert (outcome.code, [each.cause for each in outcomes]) == (0, ["node", "grow", None])
    started = events(folder, "attempt_started")
    assert [(event["ranks"], event["ranks_wanted"], len(event["nodes"])) for event in started] == [
        (4, 4, 2), (2, 4, 1), (4, 4, 2)
    ]  # fmt: skip


def test_without_a_spare_and_min_ranks_it_waits_for_a_node_and_then_ends_with_75(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.join("n2")
    later(lambda: (wait_for(*(cluster.root / f"pid-{rank}" for rank in range(4))), cluster.joined["n2"].kill()))
    outcome, outcomes, _ = cluster.run("time.sleep(600)", rejoin_s=2.0)
    assert (outcome.code, len(outcomes)) == (75, 1)


def test_a_node_that_is_silent_is_lost_after_the_lease_and_joins_again(cluster: Cluster) -> None:
    """A stopped agent is a cut line for both sides: what it sends does not come."""
    node = cluster.join("n2")
    body = """
    put(f"begun-{attempt}", str(os.getpid()))
    time.sleep(600 if not attempt else 0)
    """

    def silence() -> None:
        wait_for(cluster.root / "begun-0-3", cluster.root / "begun-0-0")
        node.send_signal(signal.SIGSTOP)
        time.sleep(9)
        node.send_signal(signal.SIGCONT)

    later(silence)
    outcome, outcomes, folder = cluster.run(body, lease="5s")
    assert (outcome.code, len(outcomes)) == (0, 2)
    (lost,) = events(folder, "node_lost")
    assert (lost["node"], lost["why"]) == ("n2", "it was silent for 5.0s")
    assert 4.5 < lost["detected_s"] < 9
    assert not is_alive(int((cluster.root / "begun-0-3").read_text())), "killed before the next attempt began"


def test_a_short_silence_does_not_end_the_attempt(cluster: Cluster) -> None:
    node = cluster.join("n2")

    def silence() -> None:
        wait_for(cluster.root / "pid-3")
        node.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        node.send_signal(signal.SIGCONT)

    later(silence)
    outcome, outcomes, _ = cluster.run("time.sleep(4)")
    assert (outcome.code, len(outcomes)) == (0, 1)


def test_a_node_that_is_to_be_stopped_leaves_after_a_save(cluster: Cluster) -> None:
    for name in ("n2", "n3"):
        cluster.join(name)
    body = """
    def leave(number, frame):
        os._exit(75)
    signal.signal(signal.SIGTERM, leave)
    put(f"parent-{attempt}", str(os.getppid()))
    time.sleep(600 if not attempt else 0)
    """
    left = []

    def stop() -> None:
        wait_for(*(cluster.root / f"parent-0-{rank}" for rank in range(4)))
        pid = int((cluster.root / "parent-0-2").read_text())
        left.extend(name for name, process in cluster.joined.items() if process.pid == pid)
        os.kill(pid, signal.SIGTERM)

    later(stop)
    outcome, outcomes, folder = cluster.run(body)
    assert (outcome.code, [each.cause for each in outcomes]) == (0, ["leave", None])
    assert outcomes[0].reason == f"node {left[0]} is to be stopped, after step 0"
    assert [event["nodes"][1] == left[0] for event in events(folder, "attempt_started")] == [True, False]
    assert cluster.output(left[0]).endswith(f"{left[0]} leaves\n")
    assert cluster.joined[left[0]].returncode == 143
    assert not events(folder, "node_lost")


def test_a_wrong_key_another_version_a_second_node_of_a_name_and_no_run_folder(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = NodesConfig(count=2, listen=cluster.address, lease="30s", wait="200s")
    host, port = cluster.address.split(":")
    with lead.opened(config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        wrong = cluster.join("n2", SMALTI_PEER_KEY="another")
        assert f"the lead at {cluster.address} has another SMALTI_PEER_KEY" in cluster.output("n2")
        assert (wrong.returncode, nodes.room) == (2, 1)

        def answer(**request: Any) -> dict[str, Any]:
            with stream.connect(host, int(port), KEY.encode()) as connection:
                stream.send_message(connection, request)
                return dict(stream.json.loads(connection.recv_bytes()))

        assert "has Smalti 0.0.0" in answer(join="n2", smalti="0.0.0", free_bytes=0)["refused"]
        assert "--name" in answer(join=nodes.name, smalti=joined.__version__, free_bytes=0)["refused"]
        with pytest.raises((EOFError, OSError)):
            answer(wrong=1)
        assert nodes.room == 1
        monkeypatch.setattr(joined, "LOST", ())
        with stream.connect(host, int(port), KEY.encode()) as connection:
            stream.send_message(connection, {"join": "n2", "smalti": joined.__version__, "free_bytes": 0})
            assert stream.receive_message(connection) == {"run": "toy", "lease_s": 30.0, "memory_bytes": 0}
            assert nodes.wait(2) == 2
            folder = RunFolder.join(tmp_path, 0)
            assert nodes.place(2) == [nodes.name, "n2"]
            ranks = nodes.start(["sleep", "500"], folder, ranks=2, threads=1, memory=None)
            report = {"start": 1, "codes": [0], "pids": [7], "stopped": [False], "slots": ""}
            stream.send_message(connection, {**report, "start": 0, "codes": [3]})  # of an earlier attempt
            stream.send_message(connection, report)
            deadline_s = time.monotonic() + 100
            while ranks[1].code is None:
                assert time.monotonic() < deadline_s
            assert (ranks[1].code, ranks[1].pid) == (0, 7)
            stream.send_message(connection, {"refused": "its ranks cannot be started: no folder"})
            while nodes.room == 2:
                assert time.monotonic() < deadline_s
            assert nodes.lost() is None, "its ranks had ended"
            ranks[0].kill()
        with pytest.raises(UserError, match="cannot be opened"), lead.opened(config, ranks=2, run="toy"):
            pass
    monkeypatch.delenv("SMALTI_PEER_KEY")
    with pytest.raises(UserError, match="a key that all nodes have"), lead.opened(config, ranks=2, run="toy"):
        pass
