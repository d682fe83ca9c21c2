"""``smalti fleet launch --on CLUSTER`` with a real Slurm: ends, logs, stop, resume, and a node that fails."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from network_nodes import wait_for
from slurm_cluster import Slurm, slurm, smalti, why_not
from train_process import losses, one_rank, write_recipe

from smalti.config.clusters import ClusterConfig
from smalti.fleet.launch.slurm import command_of, job_name
from smalti.track.run import RunFolder


def test_ranks_of_one_node_are_one_task_and_more_are_a_task_each() -> None:
    cluster = ClusterConfig(engine="slurm", options=("--partition=a b; touch pwned",), ranks_per_node=4)
    assert command_of(cluster, ["smalti"], ranks=4, cores=0, gpus=4) == [
        "srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus=4", "--partition=a b; touch pwned", "smalti",
    ]  # fmt: skip
    assert command_of(cluster, ["smalti"], ranks=8, cores=16, gpus=0)[:-2] == [
        "srun", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=0", "--cpus-per-task=2",
    ]  # fmt: skip
    assert job_name("demo-7", 0, "c0ffee" * 5) == "smalti-demo-7-0-c0ffeec0"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm"), settings="SlurmdTimeout=10\n") as made:
        yield made


class Fleet:
    """``smalti fleet`` on the first node."""

    def __init__(self, cluster: Slurm, work: Path) -> None:
        self.cluster, self.work = cluster, work
        cluster.variables["SMALTI_HOME"] = str(work / "home")
        (work / "home").mkdir()
        (work / "home" / "clusters.yaml").write_text(
            "clusters: {big: {engine: slurm, options: [--mem=0, --overcommit]}}"
        )

    def call(self, *arguments: str, timeout_s: float = 120) -> str:
        return self.cluster.call(*smalti("fleet", *arguments), cwd=self.work, timeout_s=timeout_s)

    def show(self, run: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.call("show", run, "--json"))
        return shown

    def until(self, run: str, *states: str, seconds: float = 150) -> dict[str, Any]:
        end_s = time.monotonic() + seconds
        while (shown := self.show(run))["state"] not in states:
            assert time.monotonic() < end_s, (shown, self.call("events", run))
            time.sleep(0.5)
        return shown


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.exhaustive  # a real Slurm; the only test of its exit codes, signals and node failures
def test_a_run_in_slurm_ends_stops_resumes_and_survives_its_node(cluster: Slurm, tmp_path: Path) -> None:
    write_recipe(tmp_path, one_rank("30step"))
    fleet = Fleet(cluster, tmp_path)
    launch = ("launch", "r.yaml", "--on", "big", "--pack")
    fleet.call(*launch, "name=short")
    assert fleet.until("short-1", "COMPLETED", "FAILED", "STOPPED")["state"] == "COMPLETED", fleet.call("logs", "1")
    assert "done, 30 steps" in fleet.call("logs", "short-1")
    (used,) = set(cluster.call("squeue", "--states=all", "--noheader", "--format=%N").split())
    fleet.call("cordon", used, "--reason", "test")
    fleet.call(*launch, "name=elsewhere")
    assert fleet.until("elsewhere-2", "COMPLETED", "FAILED", "STOPPED")["state"] == "COMPLETED", fleet.call("logs", "2")
    assert len(set(cluster.call("squeue", "--states=all", "--noheader", "--format=%N").split())) == 2
    fleet.call("cordon", used, "--off")
    fleet.call(*launch, "name=bad", "train.parallel.threads=4000")
    bad = fleet.until("bad-3", "COMPLETED", "FAILED", "STOPPED")
    assert (bad["state"], bad["cause"]) == ("FAILED", "usage"), bad
    assert "Slurm took no job" in bad["attempts"][0]["reason"], bad

    fleet.call(*launch, "name=long", "train.duration=2000step")
    wait_for(tmp_path / "runs/long/checkpoints/latest")
    fleet.call("stop", "long-4", "--yes")
    stopped = fleet.until("long-4", "STOPPED", "FAILED", "COMPLETED")
    assert (stopped["state"], stopped["cause"], stopped["attempts"][0]["code"]) == ("STOPPED", "user", 75)
    fleet.call("resume", "long-4")
    ended = fleet.until("long-4", "COMPLETED", "FAILED", "STOPPED")
    assert (ended["state"], len(ended["attempts"])) == ("COMPLETED", 2), fleet.call("logs", "long-4")


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.exhaustive  # Slurm takes 20 s to notice
def test_a_run_whose_node_fails_is_submitted_again_and_resumes(cluster: Slurm, tmp_path: Path) -> None:
    write_recipe(tmp_path, one_rank("30000step"))
    fleet = Fleet(cluster, tmp_path)
    cluster.call("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    fleet.call("launch", "r.yaml", "--on", "big", "--pack")
    wait_for(tmp_path / "runs/t/checkpoints/latest")
    cluster.nodes.kill("n2")
    cluster.call("scontrol", "update", "NodeName=n1", "State=RESUME")
    end_s = time.monotonic() + 120
    while len(fleet.show("t-1")["attempts"]) < 2 or not resumptions(tmp_path / "runs/t"):
        assert time.monotonic() < end_s, fleet.call("logs", "t-1") + fleet.call("events", "t-1")
        time.sleep(0.5)
    first = fleet.show("t-1")["attempts"][0]
    assert (first["code"], "failed (Slurm: NODE_FAIL)" in first["reason"]) == (75, True), first
    fleet.call("stop", "t-1", "--yes")
    assert fleet.until("t-1", "STOPPED", "FAILED", "COMPLETED")["state"] == "STOPPED"
    steps = [step for step, _ in losses(tmp_path / "runs/t")]
    assert steps == list(range(1, len(steps) + 1))


def resumptions(folder: Path) -> list[int]:
    """The attempts of a run that have resumed."""
    return [event["attempt"] for event in RunFolder.read(folder).events() if event["event"] == "resumed"]
