"""``smalti fleet``: what it queues, prints and refuses; and two real runs, of which one preempts the other."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import train_process
from cli_in_process import run_cli
from queued import history

from smalti.base.errors import UserError
from smalti.cli.fleet.sweep import combinations, name_of
from smalti.fleet.controller import start
from smalti.fleet.launch import code
from smalti.fleet.queue import changes, runs

pytestmark = pytest.mark.usefixtures("home")

CANARY = "canary-5dd1b0"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its data; no controller is started."""
    monkeypatch.setattr(start, "ensure", lambda: None)
    monkeypatch.setattr(code, "git_state", lambda folder: {"commit": "c0ffee", "dirty": False})
    train_process.write_recipe(tmp_path, train_process.one_rank())
    return tmp_path


def answer(work: Path, *arguments: str) -> Any:
    """The JSON of a command that succeeds."""
    done = run_cli(work, "fleet", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(work: Path, *arguments: str) -> str:
    """The message of a command that the user must change."""
    done = run_cli(work, "fleet", *arguments)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_launched_run_is_listed_shown_and_stopped(work: Path) -> None:
    launched = answer(work, "launch", "r.yaml", "--on", "local", "--yes", "priority=low", "train.optimizer.lr=2e-3")
    assert launched["id"] == "t-1"
    (listed,) = answer(work, "ls")
    assert {"id": "t-1", "name": "t", "state": "PENDING", "priority": 10}.items() <= listed.items()
    assert answer(work, "show", "1") == answer(work, "show", "t-1") == listed
    assert listed["folder"] == str(work / "runs" / "t")
    (event,) = answer(work, "events", "t-1")
    assert (event["state"], event["cause"], event["source"]) == ("PENDING", "launched", "user")
    stored = runs.read("t-1")
    assert "lr: 0.002" in (stored.recipe or ""), "the resolved recipe"
    assert stored.command == (sys.executable, "-m", "smalti", "train", "{recipe}")
    assert "hint: smalti fleet stop t-1 --yes" in refused(work, "stop", "t-1")
    assert answer(work, "stop", "t-1", "--yes")["state"] == "STOPPED"
    assert run_cli(work, "fleet", "wait", "t-1").returncode == 143
    assert answer(work, "resume", "t-1")["state"] == "PENDING"


def test_a_sweep_queues_a_run_for_each_combination(work: Path) -> None:
    sweep = ["launch", "r.yaml", "priority=low", "--sweep", "train.optimizer.lr=1e-4,3e-4", "--sweep", "seed=1,2"]
    rows = answer(work, *sweep, "--dry-run")
    assert [row["name"] for row in rows] == [f"t-lr-{lr}-seed-{seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2)]
    assert answer(work, "ls") == []
    rows = answer(work, *sweep, "name=w")
    assert [row["id"] for row in rows] == ["w-lr-1e-4-seed-1-1", "w-lr-1e-4-seed-2-2", "w-lr-3e-4-seed-1-3",
                                           "w-lr-3e-4-seed-2-4"]  # fmt: skip
    last = runs.read("4")
    assert "lr: 0.0003" in (last.recipe or "")
    assert "seed: 2" in (last.recipe or "")
    assert (last.priority, last.folder) == (10, str(work / "runs" / "w-lr-3e-4-seed-2"))
    assert "4 runs would be queued" in run_cli(work, "fleet", *sweep, "--dry-run").stdout
    broken = ["launch", "r.yaml", "--sweep", "seed=3,4", "--sweep", "train.optimizer.lr=1e-4,fast"]
    assert "fast" in refused(work, *broken)
    assert len(answer(work, "ls")) == 4, "nothing of a sweep with a wrong value is queued"


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        (["a.b=1,2"], [("a.b=1",), ("a.b=2",)]),
        (["a=[1, 2],[3]", "b='x,y'"], [("a=[1, 2]", "b='x,y'"), ("a=[3]", "b='x,y'")]),
        (["a=1", "b=2,3"], [("a=1", "b=2"), ("a=1", "b=3")]),
        (["a=1,1"], "'1' is there twice"),
        (["a=1", "a=2"], "'a' is there twice"),
        (["a"], "KEY=VALUE"),
        (["a="], "KEY=VALUE"),
        (["=1"], "KEY=VALUE"),
        (["name=a,b"], "the values name the runs"),
        (["a=[1"], "KEY=VALUE"),
        (["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))], "1,600 runs"),
    ],
)
def test_combinations_of_a_sweep(sweeps: list[str], expected: Any) -> None:
    if isinstance(expected, list):
        assert combinations(sweeps) == expected
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        combinations(sweeps)


def test_the_names_of_a_sweep() -> None:
    assert [name_of("d", [f"a.x={value}"]) for value in ("-1", "1", "[1, 2]")] == ["d-x-m1", "d-x-1", "d-x-1-2"]


def test_the_text_of_the_listing_verbs(work: Path) -> None:
    assert "smalti fleet launch RECIPE" in run_cli(work, "fleet", "ls").stdout
    run_cli(work, "fleet", "launch", "r.yaml", "train.parallel.threads=1")
    assert "t-1  PENDING" in run_cli(work, "fleet", "ls").stdout
    assert "no run is running" in run_cli(work, "fleet", "ls", "--state", "running").stdout
    assert "did you mean 'RUNNING'?" in refused(work, "ls", "--state", "RUNING")
    assert "1 core\n" in run_cli(work, "fleet", "show", "t-1").stdout
    assert "launched" in run_cli(work, "fleet", "events", "t-1").stdout
    assert "has no output" in refused(work, "logs", "t-1")


def test_a_run_can_be_cloned_and_updated(work: Path) -> None:
    run_cli(work, "fleet", "launch", "r.yaml")
    assert "allowed: one run for each run folder" in refused(work, "clone", "t-1")
    copy = answer(work, "clone", "t-1", "name=u", "train.optimizer.lr=5e-3", "--after", "t-1")
    assert copy["id"] == "u-2"
    assert answer(work, "show", "u-2")["depends_on"] == ["t-1"]
    assert answer(work, "show", "u-2")["folder"] == str(work / "runs" / "u")
    assert answer(work, "update", "u-2", "priority=high", "max_duration=2h")["priority"] == 90
    assert answer(work, "show", "u-2")["max_duration_s"] == 7200
    assert "'gpus' of a launched run cannot change" in refused(work, "update", "u-2", "gpus=2")
    assert "priority = urgent is not allowed" in refused(work, "update", "u-2", "priority=urgent")


def test_logs_follow_through_the_attempts_to_the_end(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has no output yet, then that of two attempts, then it ends."""
    run_cli(work, "fleet", "launch", "r.yaml")
    place = runs.read("t-1").place

    def events() -> Iterator[None]:
        place.mkdir(parents=True)
        yield
        for name, output in (("0", b"first\n"), ("0", b"first\nsecond\n"), ("1", b"third \xff\n")):
            (place / f"attempt-{name}.log").write_bytes(output)
            yield
        changes.stop("t-1")
        yield

    steps = events()
    monkeypatch.setattr("smalti.cli.fleet.follow.time.sleep", lambda seconds: next(steps))
    assert run_cli(work, "fleet", "logs", "t-1", "-f").stdout == "first\nsecond\nthird \ufffd\n"
    assert run_cli(work, "fleet", "logs", "t-1").stdout == "third \ufffd\n"
    assert answer(work, "logs", "t-1", "--attempt", "0")["lines"] == ["first", "second"]
    assert "no output of attempt 7" in refused(work, "logs", "t-1", "--attempt", "7")


def test_the_dry_run_queues_nothing(work: Path) -> None:
    config = answer(work, "launch", "r.yaml", "ranks=2", "train.parallel.threads=1", "--dry-run")
    assert config["train"]["parallel"]["ranks"] == 2
    assert answer(work, "ls") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r.yaml", "--on", "slurm"], "{slurm: {engine: slurm}}"),
        (["r.yaml", "--on", "c1"], "there is no cluster of this name\nallowed: local"),
        (["r.yaml", "name=a; touch pwned"], "cannot be a folder name"),
        (["r.yaml", "name=../../pwned"], "cannot be a folder name"),
        (["r.yaml", "data.sources.a=$(touch pwned)"], "$(touch pwned)"),
        (["r.yaml", "gpus=1"], "launch.gpus=1 with train.parallel.device=cpu"),
        (["r.yaml", "gpus=1", "train.parallel.device=auto"], "this machine has 0"),
        (["r.yaml", "ranks=9999", "train.parallel.threads=1"], "the run needs 9999 cores"),
        (["r.yaml", "priority=101"], "low, normal, high, or 0 to 100"),
        (["r.yaml", "prioritty=low"], "prioritty"),
        (["r.yaml", "--after", "t-9"], "there is no run 't-9'"),
    ],
)
def test_what_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr("smalti.fleet.controller.__main__.visible_gpus", list)
    assert message in refused(work, "launch", *arguments)
    assert not (work / "pwned").exists()
    assert answer(work, "ls") == []


def test_no_secret_of_the_environment_is_written(work: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_SECRET"):
        monkeypatch.setenv(name, CANARY)
    answer(work, "launch", "r.yaml")
    assert CANARY not in json.dumps(answer(work, "show", "t-1"))
    assert not [file for file in home.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()]


def _smalti(work: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``smalti fleet`` on a machine of one core, so that two runs do not fit."""
    return subprocess.run(
        [sys.executable, "-m", "smalti", "fleet", *arguments],
        cwd=work, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240, check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_run_preempts_another_which_continues_with_the_same_losses(tmp_path: Path, home: Path) -> None:
    """The real thing: a controller in the background, two trainings, a preemption. No secret is written anywhere.

    Each of these alone is in the other classes: the preemption of a fake command (test_fleet_controller.py), a stop by
    SIGTERM and the run that continues (test_killed_runs.py), what is launched in a shell with secrets (above).
    """
    train_process.write_recipe(tmp_path, train_process.one_rank("200step").replace("threads: 1, ", ""))
    secrets = {"HF_TOKEN": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY, "MY_SECRET": CANARY}
    low = _smalti(
        tmp_path, "launch", "r.yaml", "name=low", "priority=low", "preemptible=true", "--pack", "--json", **secrets
    )
    assert json.loads(low.stdout)["id"] == "low-1", low.stderr
    end_s = time.monotonic() + 120
    while not train_process_steps(tmp_path / "runs" / "low"):
        assert time.monotonic() < end_s, (home / "fleet" / "controller.log").read_text()
        time.sleep(0.1)
    arguments = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert any("smalti train" in line for line in arguments)
    assert not [line for line in arguments if CANARY in line]
    assert _smalti(tmp_path, "launch", "r.yaml", "name=high", "priority=high", "--pack").returncode == 0
    for run in ("high-2", "low-1"):
        ended = _smalti(tmp_path, "wait", run)
        assert ended.returncode == 0, ended.stdout + ended.stderr + _smalti(tmp_path, "logs", run).stdout
    assert history(runs.read("low-1"))[3:7] == ["RUNNING", "TERMINATING", "QUEUED", "STARTING"]
    assert history(runs.read("high-2")) == ["PENDING", "QUEUED", "STARTING", "RUNNING", "COMPLETED"]
    low_losses, high_losses = (train_process.losses(tmp_path / "runs" / name) for name in ("low", "high"))
    assert low_losses == high_losses
    assert "done, 200 steps" in _smalti(tmp_path, "logs", "low-1").stdout
    assert "rank-000" not in _smalti(tmp_path, "logs", "low-1", "--rank", "0").stderr
    for file in [*home.rglob("*"), *(tmp_path / "runs").rglob("*")]:
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file


def train_process_steps(folder: Path) -> int:
    """Return how many steps a run has logged."""
    return len(train_process.losses(folder)) if (folder / "metrics.jsonl").exists() else 0
