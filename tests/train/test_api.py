"""``build`` and ``fit`` from Python: no part of a config is ignored silently, and a process always ends."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_run
from gloo_ranks import run_ranks

from smalti.base.errors import UserError
from smalti.config.load import dump, from_dict
from smalti.config.run import JobConfig, RunConfig
from smalti.evals.in_loop import heldout_hook
from smalti.train import Result, api, build, fit
from smalti.train.loop import Job


def _with_heldout(root: Path) -> RunConfig:
    tree = toy_run.config(root, duration="3step").model_dump(mode="json")
    tree["data"]["heldout"] = {"code": str(root / "tokens/code")}
    return from_dict(RunConfig, tree, "toy").config


def test_ranks_that_nobody_has_started_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.parallel.ranks=2, and this process is one rank") as raised:
        build(toy_run.config(tmp_path, parallel={"ranks": 2}))
    assert "torchrun --nproc-per-node 2" in str(raised.value.hint)
    assert "train.parallel.ranks=1" in str(raised.value.hint)


def test_held_out_sets_that_nothing_measures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.heldout names code, but build") as raised:
        build(_with_heldout(tmp_path))
    assert "evaluation=heldout_hook" in str(raised.value.hint)
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_without_effect_is_refused(tmp_path: Path) -> None:
    config = _with_heldout(tmp_path)
    with pytest.raises(UserError, match="no effect beside evaluate="):
        build(config, evaluate=heldout_hook(config), evaluation=heldout_hook)
    bare = from_dict(JobConfig, config.model_dump(mode="json", include={"name", "folder", "train"})).config
    with pytest.raises(UserError, match="no effect for a JobConfig"):
        build(bare, evaluation=heldout_hook)
    assert not (tmp_path / "runs").exists()


def test_a_launcher_with_another_number_of_ranks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert api._with_ranks_of_world(toy_run.config(tmp_path, parallel={"ranks": 2})).train.parallel.ranks == 3
    assert "has started 3 ranks, but train.parallel.ranks=2" in caplog.text


def _twice(rank: int, config: RunConfig) -> tuple[Result, Result, int]:
    first = fit(build(config, evaluation=heldout_hook))
    job: Job = build(config, evaluation=heldout_hook)  # the folder is free again
    return first, fit(job), job.config.train.parallel.ranks


@pytest.mark.slow
def test_fit_returns_the_folder_and_the_last_metrics_with_the_launchers_ranks(tmp_path: Path) -> None:
    config = _with_heldout(tmp_path)
    for first, again, ranks in run_ranks(2, _twice, config):
        assert (first.folder, first.step, ranks) == (Path(config.run_folder), 3, 2)
        assert {"loss/train/total", "metrics/eval/code/bits_per_byte", "time/token"} <= set(first.metrics)
        assert again.step == 3
        assert again.metrics["loss/train/total"] == first.metrics["loss/train/total"]
        shown = repr(first).splitlines()
        assert shown[0] == f"{first.folder}: step 3"
        assert shown[1].startswith("  loss/train/total ")
        assert any(line.startswith("  metrics/eval/code/bits_per_byte ") for line in shown)
    assert run_ranks(1, _twice, config)[0][2] == 1


SCRIPT = """
import os, signal, sys
from smalti.train import Hook, build, fit, load, rank_setup

rank_setup.matmul_rate = lambda device, precision: (1e11, 1024)  # measuring it takes a second

class Hurt(Hook):
    def on_step(self, job, result):
        if job.state.step == 3 and (what == "all raise" or os.environ["RANK"] == "1"):
            if what == "one is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("my hook")

what = sys.argv[1]
fit(build(load("recipe.yaml").config, hooks=[Hurt()]))
"""


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("one is killed", "rank 0 lost rank 1 ("),
        ("one raises", "which ended with ValueError: my hook"),
        ("all raise", "my hook"),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_a_script_that_fails_ends_and_records_the_reason(launcher: str, what: str, reason: str, tmp_path: Path) -> None:
    """Real processes: only there does Python's own end wait for ranks that are gone. Without torchrun, which ends them,
    the ranks that are left are on their own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = toy_run.config(tmp_path, duration="200step", parallel={"timeout": "60s", "threads": 1})
    (tmp_path / "recipe.yaml").write_text(dump(config))
    codes = _launch(launcher, what, tmp_path)
    status = json.loads((Path(config.run_folder) / "status.json").read_text())
    assert status["state"] == "failed"
    assert reason in status["reason"]
    if launcher == "none":
        assert codes == {"one is killed": [75, -9], "one raises": [1, 1], "all raise": [1, 1]}[what]


def _launch(launcher: str, what: str, work: Path) -> list[int]:
    """Exit codes of the launcher or the two ranks; each has a minute and a half to end."""
    from smalti.fleet.launch.local import free_port

    script, port = ["script.py", what], str(free_port())
    if launcher == "torchrun":
        under = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        started = [subprocess.Popen([sys.executable, *under, *script], cwd=work)]
    else:
        from smalti.base.env import child_environment

        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            subprocess.Popen(
                [sys.executable, *script], cwd=work,
                env=child_environment({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            )
            for rank in range(2)
        ]  # fmt: skip
    end_s = time.monotonic() + 90
    try:
        return [process.wait(max(0.1, end_s - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
