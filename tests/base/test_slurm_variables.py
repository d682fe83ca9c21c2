"""The rank of a task from Slurm 22.05's variables; those below were printed by real jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base import env, slurm
from smalti.base.errors import UserError

TASK = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip
SCRIPT = {
    "SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip
"""A script of sbatch, which is no task though it has SLURM_PROCID."""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SMALTI_ATTEMPT", *TASK, *SCRIPT):
        monkeypatch.delenv(name, raising=False)

    def lay(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return lay


def test_a_task_of_srun_is_a_rank(variables) -> None:
    variables(TASK)
    assert env.inside_world()
    assert env.world() == env.World(5, 1, 7, 2, 0, "n1", slurm.port(TASK), "srun")
    assert not env.attempt_is_open()


def test_a_requeued_job_is_another_attempt(variables) -> None:
    variables({**TASK, "SLURM_RESTART_COUNT": "2"})
    assert env.world().attempt == 2


def test_address_and_port_of_the_user_win(variables) -> None:
    variables({**TASK, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29501"})
    assert (env.world().master_addr, env.world().master_port) == ("10.0.0.7", 29501)


def test_torchruns_names_win_over_slurms(variables) -> None:
    variables({**TASK, "RANK": "1", "WORLD_SIZE": "2"})
    assert (env.world().rank, env.world().world_size) == (1, 2)


def test_a_script_of_sbatch_is_no_rank_and_leaves_nodes_out(variables) -> None:
    variables(SCRIPT)
    assert not env.inside_world()
    assert env.world() == env.World()
    assert env.nodes_left_out() == 1


def test_the_only_task_of_a_step_starts_ranks_of_its_own(variables) -> None:
    variables({**TASK, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert not env.inside_world()
    assert env.nodes_left_out() == 0


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[03-07,12],login1", "gpu03"),
        ("gpu[12,03-07]", "gpu12"),
        ("login1,gpu[03-07]", "login1"),
        ("rack[0-3]node[07-12]-ib", "rack0node07-ib"),
    ],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert slurm.first_node(nodes) == first


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_port_that_may_be_used(job: int, step: int) -> None:
    assert 1024 < slurm.port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) < 32_768


@pytest.mark.parametrize("change", [{"SLURM_PROCID": "7"}, {"SLURM_PROCID": "x"}, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}])
def test_what_cannot_be(variables, change: dict[str, str]) -> None:
    variables({**TASK, **change})
    with pytest.raises(UserError):
        env.world()
