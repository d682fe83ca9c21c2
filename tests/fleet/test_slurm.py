"""A real Slurm on two nodes: srun's tasks are the ranks of one world; stops save, and a requeued job resumes."""

import re
import time
from pathlib import Path

import pytest
from network_nodes import wait_for
from slurm_cluster import Slurm, slurm, smalti, why_not
from train_process import losses, one_rank, train, write_recipe

from smalti.track.run import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

GUIDE = Path(__file__).parents[2] / "docs/guides/several-machines.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.mark.exhaustive
def test_srun_on_two_nodes_is_the_run_that_the_agent_makes(cluster: Slurm, tmp_path: Path):
    write_recipe(tmp_path, one_rank())
    assert (done := train(tmp_path, "r.yaml", "name=one", "train.parallel.ranks=2")).returncode == 0, done.stderr
    text = cluster.call("srun", "-N2", "-n2", *smalti("train", "r.yaml", "name=two"), cwd=tmp_path, timeout_s=120)
    assert "runs/two: joining 2 ranks of srun" in text
    assert losses(tmp_path / "runs/two") == losses(tmp_path / "runs/one")
    assert RunFolder.read(tmp_path / "runs/two").config().train.parallel.ranks == 2


@pytest.mark.exhaustive
def test_the_script_of_the_guide_requeues_a_job_that_was_stopped_and_it_goes_on(cluster: Slurm, tmp_path: Path):
    write_recipe(tmp_path, one_rank("150step"))
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", GUIDE.read_text(), re.DOTALL)
    assert script is not None
    text = script[1].replace("--nodes=16", "--nodes=2").replace("--ntasks-per-node=8", "--ntasks-per-node=1")
    text = re.sub(r"#SBATCH --(gpus|cpus|time).*\n", "", text)
    (tmp_path / "job.sh").write_text(text.replace("smalti train recipe.yaml", " ".join(smalti("train", "r.yaml"))))
    job = cluster.call("sbatch", "--parsable", "--open-mode=append", "-o", "out.txt", "job.sh", cwd=tmp_path).strip()
    wait_for(tmp_path / "runs/t/checkpoints/latest")
    cluster.call("scancel", "--signal=TERM", job)
    end_s = time.monotonic() + 150
    while job in cluster.call("squeue", "-h", "-o", "%A"):
        assert time.monotonic() < end_s, (tmp_path / "out.txt").read_text()
        cluster.nodes.run("n1", ["scontrol", "update", f"JobId={job}", "StartTime=now"], env=cluster.variables)
        time.sleep(1)
    folder = RunFolder.read(tmp_path / "runs/t")
    output = (tmp_path / "out.txt").read_text()
    assert "with a checkpoint saved" in output
    assert [event["attempt"] for event in folder.events() if event["event"] == "resumed"] == [1], output
    assert folder.status()["state"] == "done"
    assert [step for step, _ in losses(folder.path)] == list(range(1, 151))


@pytest.mark.exhaustive
def test_one_task_starts_the_ranks_of_its_node_and_scancel_saves(cluster: Slurm, tmp_path: Path):
    write_recipe(tmp_path, one_rank("4000step"))
    command = smalti("train", "r.yaml", "train.parallel.ranks=2")
    process = cluster.start("srun", "-J", "alone", "-n1", *command, cwd=tmp_path)
    wait_for(tmp_path / "runs/t/checkpoints/latest", process)
    cluster.call("scancel", "-n", "alone")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "runs/t: starting 2 ranks at step 0" in text
    assert RunFolder.read(tmp_path / "runs/t").status()["state"] == "stopped"


FAILS = """
import os

if os.environ.get("SLURM_PROCID") == "{rank}":
    from smalti.base.errors import UserError
    from smalti.train import loop

    asked = loop.train_step

    def train_step(state, *rest):
        if state.step == 3:
            raise UserError("no room")
        return asked(state, *rest)

    loop.train_step = train_step
"""
"""``sitecustomize.py`` of the ranks: one of them fails by itself."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rank", "code", "message"),
    [
        (1, 2, "rank 0 lost rank 1 (n2), which ended with UserError: no room"),
        (0, 75, "rank 1 lost rank 0 (n1): the store, which is at rank 0, does not answer"),
    ],
)
def test_srun_ends_with_what_one_rank_says_unless_the_store_went_with_it(
    cluster: Slurm, tmp_path: Path, rank: int, code: int, message: str
):
    write_recipe(tmp_path, one_rank())
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(FAILS.format(rank=rank))
    command = ["env", f"PYTHONPATH={tmp_path / 'site'}", *smalti("train", "r.yaml")]
    process = cluster.start("srun", "--kill-on-bad-exit=0", "-N2", "-n2", *command, cwd=tmp_path)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == code, text
    assert message in text
    status = RunFolder.read(tmp_path / "runs/t").status()
    assert (status["state"], "no room" in status["reason"]) == ("failed", True)
