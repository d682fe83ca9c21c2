"""``smalti fleet launch`` of recipes with a section ``tune``, also of a model that another run has yet to write."""

import json
from pathlib import Path

import pytest
import yaml
from cli_in_process import run_cli
from tiny_runs import tiny_run

from smalti.cli.working_directory import load_run
from smalti.fleet.controller import start
from smalti.fleet.launch import code
from smalti.fleet.queue import runs

pytestmark = pytest.mark.usefixtures("home")

RECIPE = """
base: instruct
name: tuned
init_from: runs/tiny
tune:
  examples: {files: [sums.jsonl], heldout_frac: 0.2}
train:
  duration: 2ep
  global_batch_tokens: 384
  parallel: {device: cpu, threads: 1}
  precision: {compute: fp32}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, examples and a recipe; no controller is started."""
    monkeypatch.setattr(start, "ensure", lambda: None)
    monkeypatch.setattr(code, "git_state", lambda folder: {"commit": "c0ffee", "dirty": False})
    tiny_run(tmp_path)
    rows = [{"prompt": f"add {n} and 1", "completion": str(n + 1)} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def test_what_is_queued_is_the_recipe_of_the_same_run(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_cli(work, "fleet", "launch", "r.yaml", "priority=low", "train.optimizer.lr=2e-3")
    assert done.returncode == 0, done.stderr
    (work / "queued.yaml").write_text(runs.read("tuned-1").recipe or "")
    monkeypatch.chdir(work)
    expected = load_run("r.yaml", ["launch.priority=low", "train.optimizer.lr=2e-3"]).config
    assert load_run("queued.yaml").config == expected
    assert expected.train.optimizer.lr == 2e-3
    prepared = list((work / "data" / "tune").iterdir())
    assert len(prepared) == 1, "tokenized once"


def test_a_model_that_a_dependency_writes_may_be_missing(work: Path) -> None:
    assert run_cli(work, "fleet", "launch", str(work / "runs/tiny"), "name=base").returncode == 0
    arguments = ("fleet", "launch", "r.yaml", "init_from=runs/base/export")
    assert "to take from init_from: runs/base/export" in run_cli(work, *arguments).stderr
    assert run_cli(work, *arguments, "--after", "base-1").returncode == 0
    run = runs.read("tuned-2")
    assert run.folder == str(work / "runs" / "tuned")
    assert yaml.safe_load(run.recipe or "")["train"]["duration"] == "2ep", "resolved when it starts"
    hostile = run_cli(work, *arguments, "name=$(touch pwned)", "--after", "base-1")
    assert hostile.returncode == 2
    assert not (work / "pwned").exists()
