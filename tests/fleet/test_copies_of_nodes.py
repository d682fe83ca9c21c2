"""Copies in memory of several nodes: each holds the shards of the one before, so those of a lost node are not lost."""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import checkpoint, digests

from smalti.cost.memory.per_rank import PEER_COPIES_OF_NODES
from smalti.fleet.neighbour import stream
from smalti.fleet.nodes.copies import Copies
from smalti.fleet.nodes.replication import LocalNode, Replication
from smalti.track.checkpoints.names import complete, folder_name

KEY = b"a key"


class Cluster:
    """Nodes of two ranks each, without ranks."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.copies, self.members = root, [], []
        for number in range(count):
            self.add(number)
        self.replication = Replication(self.members[0])
        self.replication.begin(self.members[1:])

    def add(self, number: int) -> None:
        (self.root / f"n{number}").mkdir()
        self.copies.append(Copies(self.root / f"n{number}", KEY, "127.0.0.1"))
        self.members.append(LocalNode(f"n{number}", self.copies[-1]))

    def save(self, step: int, *, until: int | None = None, seed: int = 0) -> Path:
        """Write a copy of all ranks, and each node's part of it; returns the whole one."""
        made = checkpoint(self.root / f"made-{seed}", step, shards=2 * len(self.copies), seed=seed)
        for number, copies in enumerate(self.copies[:until]):
            for name in complete(copies.ranks):
                shutil.rmtree(copies.ranks / name)
            mine = shutil.copytree(made, copies.ranks / made.name)
            for shard in (mine / "shards").iterdir():
                if int(shard.stem) // 2 != number:
                    shard.unlink()
        return made

    def look(self, until: str) -> None:
        """Let the lead look until each node holds a copy and what is older is deleted."""
        deadline_s = time.monotonic() + 20
        while self.replication._kept != until or any(self.held(path.name) != [until] for path in self.root.glob("n?")):
            self.replication.look()
            assert time.monotonic() < deadline_s, list(self.root.rglob("held/*"))
            time.sleep(0.01)

    def held(self, node: str) -> list[str]:
        return sorted(path.name for path in (self.root / node / "held").iterdir() if path.name[0] != ".")

    def shards(self, number: int, name: str, folder: str = "held") -> list[int]:
        return sorted(int(path.stem) for path in (self.root / f"n{number}" / folder / name / "shards").iterdir())

    def lose(self, number: int) -> None:
        self.copies[number].close()
        shutil.rmtree(self.root / f"n{number}")
        del self.copies[number], self.members[number]

    def gather(self, members: Sequence[int] | None = None) -> None:
        used = self.members[1:] if members is None else [self.members[number] for number in members]
        self.replication.gather(used, [each for each in self.members[1:] if each not in used])
        self.replication.begin(used)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 3)
    yield made
    for copies in made.copies:
        copies.close()


def test_each_node_holds_the_shards_of_the_one_before_and_only_of_the_newest_copy(three: Cluster) -> None:
    for step in (3, 6):
        made = three.save(step)
        three.look(made.name)
        assert [three.shards(number, made.name) for number in range(3)] == [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]
    assert all(three.shards(number, made.name, "ranks") == [2 * number, 2 * number + 1] for number in range(3))


def test_the_planner_counts_the_parts_that_a_node_holds_while_it_fetches_a_copy(three: Cluster) -> None:
    three.look(three.save(3).name)
    three.save(6)
    three.replication.look()  # begins to hold it
    deadline_s = time.monotonic() + 20
    while any(copies.last_job != three.replication._job for copies in three.copies):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    newest = three.save(9).name  # its ranks delete the one before
    for copies in three.copies:
        shutil.copytree(copies.ranks / newest, copies.ranks / ".step-00000012.tmp")
        own_bytes = sum(path.stat().st_size for path in (copies.ranks / newest / "shards").glob("*.safetensors"))
        files = {path.stat().st_ino: path.stat().st_size for path in copies.ranks.parent.rglob("*.safetensors")}
        assert sum(files.values()) == PEER_COPIES_OF_NODES * own_bytes


@pytest.mark.parametrize("lost", [1, 2])
def test_after_the_loss_of_a_node_every_node_and_a_spare_get_the_whole_copy(three: Cluster, lost: int) -> None:
    made = three.save(6)
    three.look(made.name)
    later = three.save(9)  # not replicated yet
    three.lose(lost)
    three.add(7)
    three.gather()
    for copies in three.copies:
        assert complete(copies.ranks) == [made.name], "the newer one is lost"
        assert digests(copies.ranks / made.name) == digests(made)
    assert three.held("n0") == [made.name]
    assert later.name not in three.held("n7")


def test_after_the_death_of_a_rank_the_newest_copy_of_all_nodes_is_used(three: Cluster) -> None:
    three.look(three.save(6).name)
    three.save(9)
    three.save(12, until=2)  # one node was killed before it had its part
    three.gather()
    assert [complete(copies.ranks) for copies in three.copies] == [[folder_name(6)]] * 3
    made = three.save(9, seed=1)
    three.gather()
    assert all(digests(copies.ranks / made.name) == digests(made) for copies in three.copies)


def test_a_damaged_shard_and_a_node_that_is_lost_without_a_copy_leave_the_disk(three: Cluster) -> None:
    made = three.save(6)
    three.look(made.name)
    for folder in ("ranks", "held"):
        path = three.root / "n0" / folder / made.name / "shards/00001.safetensors"
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(b"?" + data[1:])
    three.lose(1)
    three.gather()
    assert [complete(copies.ranks) for copies in three.copies] == [[], []]
    assert three.held("n0") == []


def test_what_is_held_of_steps_that_are_trained_again_is_removed(three: Cluster) -> None:
    three.look(three.save(6).name)
    three.save(9, until=2)
    three.copies[0].do({"call": "hold", "job": -1, "copy": folder_name(9), "files": {}})
    three.gather()
    assert [three.held(f"n{number}") for number in range(3)] == [[folder_name(6)]] * 3
    made = three.save(9, seed=1)
    three.look(made.name)
    three.lose(2)
    three.gather()
    assert all(digests(copies.ranks / made.name) == digests(made) for copies in three.copies)


def test_a_stop_ends_the_wait_for_a_node_and_the_copies_remain(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = three.save(6)
    three.look(made.name)
    monkeypatch.setattr(three.members[1], "do", lambda job: None)
    asked = iter([False] * 3)
    three.replication.gather(three.members[1:], [], stops=lambda: next(asked, True))
    assert three.held("n0") == [made.name]
    assert complete(three.copies[0].ranks) == [made.name]


def test_names_that_are_no_files_of_a_copy_are_refused(three: Cluster) -> None:
    host, port = three.copies[0].address.split(":")

    def answer(request: dict[str, Any]) -> str:
        with stream.connect(host, int(port), KEY) as connection:
            stream.send_message(connection, request)
            return str(stream.json.loads(connection.recv_bytes()).get("refused"))

    assert "are no files of a copy" in answer({"copy": "../..", "files": ["a"]})
    assert "are no files of a copy" in answer({"copy": folder_name(3), "files": ["../../a"]})
    assert "is not here" in answer({"copy": folder_name(3), "files": ["COMPLETE"]})
    with pytest.raises(stream.AuthenticationError):
        stream.connect(host, int(port), b"another key")
