"""Runs on several nodes (network namespaces) with Smalti's agents: lost nodes, cut lines, a lead that is killed."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_run
from forked_command import ForkedCommand, start
from made_checkpoints import digests
from network_nodes import Nodes, nodes, why_not

from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.fleet.agent import memory
from smalti.track.checkpoints.names import complete
from smalti.track.run import RunFolder

pytestmark = pytest.mark.slow  # processes

STEPS = 40


@pytest.fixture
def three() -> Iterator[Nodes]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with nodes(3) as made:
        yield made


class Run:
    """A run with a rank on each node, whose lead is on n1, and the nodes that join it."""

    def __init__(self, made: Nodes, root: Path, steps: int = STEPS, ranks: int = 2, **train: Any) -> None:
        self.made, self.steps, self.ranks = made, steps, ranks
        nodes = {"count": ranks, "listen": _listen(made, "n1")}
        self.config = _config(root / "nodes", steps, ranks, nodes=nodes, **train)
        self.recipe = root / "nodes/recipe.yaml"
        self.recipe.write_text(dump(self.config))
        self.folder = RunFolder(self.config.run_folder)

    def lead(self, node: str = "n1", *overrides: str) -> ForkedCommand:
        return self._start(node, "train", str(self.recipe), *overrides)

    def join(self, node: str, *leads: str) -> ForkedCommand:
        command = self._start(node, "fleet", "join", *(_listen(self.made, lead) for lead in leads or ("n1",)),
                              "--name", node)  # fmt: skip
        return command

    def _start(self, node: str, *arguments: str) -> ForkedCommand:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "SMALTI_PEER_KEY": "a key"}
        return start(*arguments, in_agent=self.made.entry(node), environment=environment)

    def wait_for_step(self, step: int) -> None:
        _wait(lambda: any(row["step"] >= step for row in self.folder.metrics()))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == kind]

    def placed(self) -> list[str]:
        """The other node of each attempt."""
        return [event["nodes"][1] for event in self.events("attempt_started")]


def _config(root: Path, steps: int, ranks: int, **train: Any) -> RunConfig:
    section = {"checkpoint": {"every": "5step"}, "parallel": {"ranks": ranks, "threads": 1}, **train}
    return toy_run.config(root, duration=f"{steps}step", **section)


def _listen(made: Nodes, node: str) -> str:
    return f"{made.address(node)}:7400"


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def _shards(config: RunConfig, steps: int) -> dict[str, str]:
    files = digests(Path(config.run_folder) / f"checkpoints/step-{steps:08d}")
    return {name: digest for name, digest in files.items() if name.startswith("shards/")}


def _folders() -> set[Path]:
    return set(memory.SHARED.glob(f"smalti-{os.getuid()}-*"))


def require_equal_to_an_undisturbed_run(run: Run, root: Path) -> None:
    """Raise unless the weights and moments equal, to the bit, those of a run of as many ranks on one machine."""
    undisturbed = _config(root / "one", run.steps, run.ranks)
    (root / "one/recipe.yaml").write_text(dump(undisturbed))
    code, output = start("train", str(root / "one/recipe.yaml")).finish(600)
    assert code == 0, output
    assert _shards(run.config, run.steps) == _shards(undisturbed, run.steps)


def test_a_spare_takes_over_from_a_killed_node_to_the_bit(three: Nodes, tmp_path: Path) -> None:
    run = Run(three, tmp_path)
    lead = run.lead()
    second = run.join("n2")
    _wait(lambda: "n2 has joined" in second.output())
    run.join("n3")
    run.wait_for_step(8)
    three.kill("n2")
    code, output = lead.finish(600)
    assert code == 0, output
    assert run.placed() == ["n2", "n3"]
    (lost,) = run.events("node_lost")
    assert (lost["node"], lost["ranks"]) == ("n2", [1])
    (resumed,) = run.events("resumed")
    assert resumed["step"] >= 5
    require_equal_to_an_undisturbed_run(run, tmp_path)


def test_a_node_whose_check_fails_makes_room_for_a_spare(three: Nodes, tmp_path: Path) -> None:
    """The check runs on both nodes of the attempt; each has the variables of one rank."""
    health = {"command": "echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR; exit $((3 * RANK))"}
    run = Run(three, tmp_path, health=health)
    lead = run.lead("n1", "chaos.faults=[{kind: sigkill, rank: 0, step: 8}]")
    second = run.join("n2")
    _wait(lambda: "n2 has joined" in second.output())
    run.join("n3")
    code, output = lead.finish(600)
    assert code == 0, output
    assert run.placed() == ["n2", "n3"]
    checks = run.events("node_checked")
    assert [(check["node"], check["result"]) for check in checks[1:]] == [("n2", "unhealthy")]
    assert [check["lines"] for check in checks] == [[f"rank {rank} of 2 at {three.address('n1')}"] for rank in (0, 1)]
    _wait(lambda: "its check failed" in second.output())
    require_equal_to_an_undisturbed_run(run, tmp_path)


@pytest.mark.exhaustive
def test_a_rank_of_another_node_that_hangs_is_named_by_the_stacks_and_counts_of_both(
    three: Nodes, tmp_path: Path
) -> None:
    run = Run(three, tmp_path, 120, restart={"hang_floor": "5s"})
    lead = run.lead("n1", "chaos.faults=[{kind: held_gil, rank: 1, step: 60}]")
    run.join("n2")
    code, output = lead.finish(600)
    assert code == 0, output
    (hung,) = run.events("rank_hung")
    assert (hung["rank"], hung["node"]) == (1, "n2")
    evidence = json.loads((run.folder.log_folder(0) / hung["evidence"]).read_text())
    assert all("File " in rank["stack"] for rank in evidence["ranks"])
    require_equal_to_an_undisturbed_run(run, tmp_path)


@pytest.mark.exhaustive
def test_a_link_that_becomes_slow_is_found_and_a_spare_takes_its_node_s_place_to_the_bit(tmp_path: Path) -> None:
    """A real ``smalti fleet check`` between four nodes, after MFU has fallen; the fifth is a spare."""
    reason = why_not() or (None if shutil.which("tc") else "needs iproute2 (tc)")
    if reason is not None:
        pytest.skip(reason)
    check = f"{sys.executable} -m smalti fleet check --own --folder {tmp_path}"
    with nodes(5) as made, ExitStack() as stack:
        run = Run(made, tmp_path, 200, ranks=4, log_every="1step", health={"command": check, "mfu_below": 0.6})
        lead = run.lead()
        for name in made.names[1:]:
            run.join(name)
        run.wait_for_step(60)
        slow, spare = run.events("attempt_started")[0]["nodes"][2], {*made.names[1:]}
        stack.enter_context(made.slowed(slow, "8mbit"))
        code, output = lead.finish(600)
    assert code == 0, output
    first, second = (set(event["nodes"][1:]) for event in run.events("attempt_started"))
    assert (first - second, second - first) == ({slow}, spare - first)
    checks = {check["node"]: (check["why"], check["result"]) for check in run.events("node_checked")}
    assert checks.pop(slow) == ("slow", "unhealthy")
    assert set(checks.values()) == {("slow", "healthy")}
    (resumed,) = run.events("resumed")
    assert resumed["step"] == run.events("attempt_ended")[0]["step"], "no step is lost"
    require_equal_to_an_undisturbed_run(run, tmp_path)


@pytest.mark.exhaustive
def test_a_line_that_is_cut_for_five_seconds_does_not_end_the_attempt(three: Nodes, tmp_path: Path) -> None:
    run = Run(three, tmp_path)
    lead = run.lead()
    run.join("n2")
    run.wait_for_step(6)
    three.cut("n2")
    time.sleep(5)
    assert run.folder.metrics()[-1]["step"] < STEPS, "the ranks wait for each other"
    three.restore("n2")
    code, output = lead.finish(600)
    assert code == 0, output
    assert run.placed() == ["n2"]
    require_equal_to_an_undisturbed_run(run, tmp_path)


@pytest.mark.exhaustive
def test_a_line_that_is_cut_for_good_is_named_and_the_run_goes_on_elsewhere(three: Nodes, tmp_path: Path) -> None:
    run = Run(three, tmp_path)
    lead = run.lead()
    second = run.join("n2")
    _wait(lambda: "n2 has joined" in second.output())
    run.join("n3")
    run.wait_for_step(6)
    ranks = second.ranks()
    three.cut("n2")
    code, output = lead.finish(600)
    assert code == 0, output
    assert run.placed() == ["n2", "n3"]
    (lost,) = run.events("node_lost")
    assert (lost["node"], lost["why"]) == ("n2", "it was silent for 10.0s")
    assert 9 < lost["detected_s"] < 14
    assert "node n2 was lost after step" in output
    _wait(lambda: not any(map(psutil.pid_exists, ranks)))  # it has killed them by itself
    require_equal_to_an_undisturbed_run(run, tmp_path)


@pytest.mark.exhaustive
def test_a_lost_node_without_a_spare_leaves_fewer_ranks(three: Nodes, tmp_path: Path) -> None:
    run = Run(three, tmp_path, restart={"min_ranks": 1})
    lead = run.lead()
    run.join("n2")
    run.wait_for_step(6)
    three.kill("n2")
    code, output = lead.finish(600)
    assert code == 0, output
    assert "continuing on 1 of 2 ranks" in output
    started = [(event["ranks"], len(event["nodes"])) for event in run.events("attempt_started")]
    assert started == [(2, 2), (1, 1)]
    assert [row["step"] for row in run.folder.metrics() if "loss/train/total" in row] == list(range(1, STEPS + 1))


def test_a_killed_lead_ends_the_ranks_of_other_nodes_and_the_command_continues_elsewhere(
    three: Nodes, tmp_path: Path
) -> None:
    run = Run(three, tmp_path)
    lead = run.lead()
    second = run.join("n2", "n1", "n3")
    run.wait_for_step(6)
    ranks = second.ranks()
    assert len(ranks) == 1
    lead.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    _wait(lambda: not any(map(psutil.pid_exists, ranks)))
    assert time.monotonic() - killed_s < 10, "within the lease"
    assert not second.ranks()
    code, output = run.lead("n3", f"train.nodes.listen={_listen(three, 'n3')}").finish(600)
    assert code == 0, output
    assert [event["attempt"] for event in run.events("attempt_started")] == [0, 1]
    assert run.placed() == ["n2", "n2"]
    require_equal_to_an_undisturbed_run(run, tmp_path)
    second.send_signal(signal.SIGTERM)
    assert second.finish()[0] == 143


def test_a_spare_continues_from_memory_after_a_node_was_lost_with_its_own_to_the_bit(
    three: Nodes, tmp_path: Path
) -> None:
    """No checkpoint is on the disk: half of the state was on the node that is killed, with all of its memory."""
    run = Run(three, tmp_path, steps=300, checkpoint={"every": "1run", "peer_copies": "20step"})
    before = _folders()
    second = run.join("n2")
    lead = run.lead()
    _wait(lambda: "n2 has joined" in second.output())
    _wait(lambda: len(_folders() - before) == 2)
    run.join("n3")
    held = [folder / "held" for folder in _folders() - before]
    _wait(lambda: all(_holds_all(folder) for folder in held))
    (of_lead,) = [folder for folder in _folders() - before if _is_open_in(lead.pid, folder)]
    three.kill("n2")
    for folder in held:
        if folder.parent != of_lead:
            shutil.rmtree(folder.parent)
    code, output = lead.finish(600)
    assert code == 0, output
    assert run.placed() == ["n2", "n3"]
    (resumed,) = run.events("resumed")
    assert resumed["source"] == "peer memory"
    assert resumed["step"] >= 20
    assert [event["step"] for event in run.events("checkpoint_saved")] == [run.steps]
    require_equal_to_an_undisturbed_run(run, tmp_path)


def _holds_all(held: Path) -> bool:
    """Whether a node holds the shards of both ranks of a copy."""
    return any(len(list((held / name / "shards").glob("*.safetensors"))) == 2 for name in complete(held))


def _is_open_in(pid: int, folder: Path) -> bool:
    """Whether a process has opened the folder, for its lock."""
    return any(os.path.realpath(each) == str(folder) for each in Path(f"/proc/{pid}/fd").iterdir())
