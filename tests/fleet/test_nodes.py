"""Two nodes (network namespaces) under torchrun: the curve of one node; a line that is cut, then the same command."""

import sys
import time
from pathlib import Path

import pytest
from network_nodes import Nodes, nodes, wait_for, why_not
from train_process import losses, one_rank, train, write_recipe

from smalti.track.run import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def two():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with nodes(2) as made:
        yield made


def torchrun(two: Nodes, work: Path, name: str, *changes: str, ranks: int = 2):
    """``smalti train`` on both nodes, as a person starts it there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=n1", "--master-port=29411"]
    recipe = ["-m", "smalti", "train", "r.yaml", f"name={name}", *changes]
    return [
        two.start(node, [*command, f"--node-rank={number}", *recipe], cwd=work) for number, node in enumerate(two.names)
    ]


def said_by(processes, seconds: float) -> list[str]:
    end_s = time.monotonic() + seconds
    return [process.communicate(timeout=max(0.1, end_s - time.monotonic()))[0] for process in processes]


@pytest.mark.exhaustive
def test_two_nodes_of_two_ranks_are_one_node_of_four(two, tmp_path):
    write_recipe(tmp_path, one_rank())
    assert (done := train(tmp_path, "r.yaml", "name=one", "train.parallel.ranks=4")).returncode == 0, done.stderr
    started = torchrun(two, tmp_path, "two")
    texts = said_by(started, 120)
    assert [process.returncode for process in started] == [0, 0], texts
    assert "joining 4 ranks of torchrun" in texts[0]
    assert losses(tmp_path / "runs/two") == losses(tmp_path / "runs/one")


@pytest.mark.exhaustive
def test_a_line_that_is_cut_ends_both_sides_with_the_silent_ranks_named_and_the_run_goes_on(two, tmp_path):
    write_recipe(tmp_path, one_rank("150step"))
    assert (done := train(tmp_path, "r.yaml", "name=one", "train.parallel.ranks=2")).returncode == 0, done.stderr
    changes = ("train.parallel.timeout=5s", "train.checkpoint.every=10step")
    started = torchrun(two, tmp_path, "cut", *changes, ranks=1)
    wait_for(tmp_path / "runs/cut/checkpoints/latest", *started)
    two.cut("n2")
    first, second = said_by(started, 60)
    assert "rank 0 lost rank 1 (n2), which does not answer" in first
    assert "rank 1 lost rank 0 (n1): the store, which is at rank 0, does not answer" in second
    for text in (first, second):
        assert "exitcode  : 75" in text, text  # of the rank; torchrun itself ends with 1
        assert "this is a bug" not in text
    status = RunFolder.read(tmp_path / "runs/cut").status()
    assert (status["state"], "lost rank" in status["reason"]) == ("failed", True)
    two.restore("n2")
    again = torchrun(two, tmp_path, "cut", *changes, ranks=1)
    texts = said_by(again, 120)
    assert [process.returncode for process in again] == [0, 0], texts
    folder = RunFolder.read(tmp_path / "runs/cut")
    assert [event["attempt"] for event in folder.events() if event["event"] == "resumed"] == [1]
    assert losses(folder.path) == losses(tmp_path / "runs/one")


@pytest.mark.exhaustive
def test_a_node_with_another_recipe_is_refused_on_both(two, tmp_path):
    write_recipe(tmp_path, one_rank())
    folder_of_n2 = tmp_path / "n2"
    folder_of_n2.mkdir()
    write_recipe(folder_of_n2, one_rank())
    text = (folder_of_n2 / "r.yaml").read_text()
    (folder_of_n2 / "r.yaml").write_text(text.replace("lr: 1e-3", "lr: 2e-3"))
    command = [sys.executable, "-m", "smalti", "train", "r.yaml"]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29412", "LOCAL_RANK": "0"}
    started = [
        two.start(node, command, cwd=cwd, env={**world, "RANK": str(rank), "LOCAL_WORLD_SIZE": "1"})
        for rank, (node, cwd) in enumerate([("n1", tmp_path), ("n2", folder_of_n2)])
    ]
    texts = said_by(started, 60)
    assert [process.returncode for process in started] == [2, 2], texts
    for text in texts:
        assert "rank 1 (n2) differs from rank 0: train.optimizer.lr: 0.001 -> 0.002" in text
    assert not (tmp_path / "runs").exists(), "nothing is written before all are alike"
