"""The lead of several nodes, with connections in place of agents."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from smalti import __version__
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.nodes import NodesConfig
from smalti.fleet.agent.evidence import Look
from smalti.fleet.agent.health import Check
from smalti.fleet.neighbour import stream
from smalti.fleet.nodes import lead, node
from smalti.track.run import RunFolder

KEY = "a key"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_PEER_KEY", KEY)


class Lead:
    """A lead of a run of two nodes with a rank each."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.config = NodesConfig(count=2, listen=f"127.0.0.1:{self.port}", lease="100s", wait="200s")
        self.joined: dict[str, stream.Connection] = {}

    def connect(self) -> stream.Connection:
        return stream.connect("127.0.0.1", self.port, KEY.encode())

    def join(self, name: str, **fields: Any) -> stream.Message:
        """Join as a node; returns the first message of the lead."""
        self.joined[name] = self.connect()
        stream.send_message(self.joined[name], {"join": name, "smalti": __version__, "free_bytes": 999, **fields})
        return stream.receive_message(self.joined[name])

    def receive(self, name: str) -> stream.Message:
        """Return the next message to a node that is no beat."""
        while (message := stream.receive_message(self.joined[name])) == {"do": "beat"}:
            pass
        return message


@pytest.fixture
def made() -> Iterator[Lead]:
    made = Lead()
    yield made
    for connection in made.joined.values():
        connection.close()


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def test_a_node_that_is_lost_before_its_ranks_are_started_ends_the_attempt(made: Lead, tmp_path: Path) -> None:
    with lead.opened(made.config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        made.join("n2")
        assert nodes.wait(2) == 2
        made.joined["n2"].close()
        _wait(lambda: nodes.room == 1)
        assert nodes.place(2) == [os.uname().nodename, "n2"]
        here, there = nodes.start(["sleep", "500"], RunFolder.join(tmp_path, 0), ranks=2, threads=1, memory=None)
        here.kill()
        lost = nodes.lost()
        assert (there.rank, lost and lost.name) == (1, "n2")


def test_a_spare_replaces_a_node_that_is_lost_before_its_ranks_are_started(made: Lead) -> None:
    with lead.opened(made.config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        made.join("n2")
        assert nodes.wait(2) == 2
        made.join("n3")
        made.joined["n2"].close()
        _wait(lambda: [node.name for node in nodes._usable()] == ["n3"])
        assert nodes.place(2)[1:] == ["n3"]


def test_a_lead_that_waits_says_how_many_nodes_have_joined(made: Lead, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = made.config.model_copy(update={"wait": "0.2s"})
    with lead.opened(config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        assert nodes.wait(2) is None
        joined = f"1 of 2 nodes has joined ({nodes.name})"
    assert [record.getMessage() for record in caplog.records] == [
        f"{joined}; waiting for 1 more at {config.listen}",
        f"{joined} within 200ms; run 'smalti fleet join {config.listen}' on 1 more",
    ]


def test_the_welcome_is_the_first_message_that_a_node_receives(made: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    send = node.Node.send

    def slow(self: node.Node, message: stream.Message) -> None:
        time.sleep(0.3 if "run" in message else 0)
        send(self, message)

    monkeypatch.setattr(node.Node, "send", slow)
    monkeypatch.setattr(lead, "BEAT_S", 0.01)
    with lead.opened(made.config, ranks=2, run="toy"):
        assert made.join("n2")["run"] == "toy"
        assert stream.receive_message(made.joined["n2"]) == {"do": "beat"}


def _fail(made: Lead, error: BaseException) -> None:
    with lead.opened(made.config, ranks=2, run="toy"):
        made.join("n2")
        raise error


def test_an_error_of_the_lead_ends_its_nodes_with_the_same_code(made: Lead) -> None:
    for error, code in ((UserError("no"), 2), (RetryableError("later"), 75), (KeyboardInterrupt(), 75)):
        with pytest.raises(type(error)):
            _fail(made, error)
        assert made.receive("n2") == {"do": "end", "code": code}


@pytest.mark.parametrize("rank", [1, 2])
def test_the_node_of_a_rank_that_keeps_failing_makes_room_for_a_spare_and_is_dropped_first(
    made: Lead, tmp_path: Path, rank: int
) -> None:
    config = made.config.model_copy(update={"count": 3})
    with lead.opened(config, ranks=3, run="toy") as nodes:
        assert nodes is not None

        def attempt(ranks: int) -> list[str]:
            assert nodes.wait(ranks) == ranks
            placed = nodes.place(ranks)[1:]
            nodes.start(["true"], RunFolder.join(tmp_path, 0), ranks=ranks, threads=1, memory=None)
            return placed

        for name in ("n2", "n3"):
            made.join(name)
        assert attempt(3) == ["n2", "n3"]
        sick, healthy = ("n2", "n3") if rank == 1 else ("n3", "n2")
        assert not nodes.replace(0), "the lead is in each attempt"
        assert not nodes.replace(rank), "there is no spare"
        assert attempt(2) == [healthy]
        assert attempt(3) == [healthy, sick]
        made.join("n4")
        assert nodes.replace(2)
        assert attempt(3) == [healthy, "n4"]


def test_what_a_node_has_reported_of_its_copies_remains_until_it_changes(made: Lead) -> None:
    with lead.opened(made.config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        made.join("n2")
        (node,) = nodes._usable()
        for copies in ({"files": {"step-1": ["a"]}, "job": 1}, {}, {"job": 2}):
            stream.send_message(made.joined["n2"], {"copies": copies})
        _wait(lambda: node.report() == {"files": {"step-1": ["a"]}, "job": 2})


def test_a_node_without_memory_for_the_copies_is_refused(made: Lead) -> None:
    with lead.opened(made.config, ranks=2, run="toy", memory_bytes=1000) as nodes:
        assert nodes is not None
        reason = "peer_copies needs 1000 B of shared memory, and n2 has 999 B free"
        with pytest.raises(DataError, match=reason):
            made.join("n2")
        assert made.join("n2", free_bytes=1000)["memory_bytes"] == 1000


def test_stacks_and_counts_come_from_all_nodes_of_an_attempt(made: Lead) -> None:
    with lead.opened(made.config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        made.join("n2")
        nodes.wait(2)
        nodes.place(2)

        def look_here() -> Look:
            number = made.receive("n2")["number"]
            seen = {"stacks": {"1": "there"}, "counts": {"1": {"0": 4}}}
            stream.send_message(made.joined["n2"], {"answer": {"number": number, **seen}})
            return Look({0: "here"}, {0: {"0": 5}})

        assert nodes.look(look_here) == Look({0: "here", 1: "there"}, {0: {"0": 5}, 1: {"0": 4}})


def test_all_nodes_of_an_attempt_are_checked_and_one_that_is_left_out_is_not_admitted_again(
    made: Lead, tmp_path: Path
) -> None:
    with lead.opened(made.config, ranks=2, run="toy") as nodes:
        assert nodes is not None
        made.join("n2")
        nodes.wait(2)
        nodes.place(2)
        environments = []

        def run_here(environment: Mapping[str, str]) -> Check:
            environments.append(environment)
            request = made.receive("n2")
            assert (request["do"], request["command"], request["limit_s"]) == ("check", "look", 9.0)
            environments.append(request["environment"])
            stream.send_message(made.joined["n2"], {"answer": {"number": request["number"], "code": 3}})
            return Check("n1", 0, tmp_path / "health.log")

        checks = nodes.check("look", 9.0, tmp_path, run_here)
        assert [(check.node, check.result, check.file.name) for check in checks] == [
            ("n1", "healthy", "health.log"),
            ("n2", "unhealthy", "health-1.log"),
        ]
        assert [(each["RANK"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in environments] == [
            ("0", "2", "1"),
            ("1", "2", "1"),
        ]
        assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]
        nodes.exclude("n2", "its check failed")
        assert made.receive("n2") == {"do": "end", "code": 75}
        assert not nodes.all_there
        with pytest.raises(DataError, match="its check failed"):
            made.join("n2")
