"""``--try``: a few steps of any recipe, in a folder of its own; ``init_from`` without a section ``model``."""

from pathlib import Path

import pytest
from cli_in_process import run_cli
from tiny_runs import tiny_run
from train_process import RECIPE, losses, train, write_recipe

from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.track.run import RunFolder

AWKWARD = """\
  schedule: {warmup: 10step, decay: 20step}
  batch_ramp: [{until: 8step, global_batch_tokens: 128}]
profile: {steps: [30, 31]}
track: {sinks: [tensorboard]}
"""
"""What a duration of two steps does not go with."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_recipe(tmp_path, RECIPE.replace("ranks: 2", "ranks: 1") + AWKWARD)
    return tmp_path


@pytest.mark.exhaustive
def test_two_steps_of_a_recipe_are_those_of_the_run_and_leave_it_alone(work: Path) -> None:
    """Only real ranks show that the trial reaches them."""
    assert run_cli(work, "train", "r.yaml", "train.duration=2step", "--dry-run").returncode == 2
    done = train(work, "r.yaml", "--try", "2")
    assert done.returncode == 0, done.stderr
    assert "runs/.try/t: done, 2 steps" in done.stderr
    assert [path.name for path in (work / "runs").iterdir()] == [".try"]
    trial = RunFolder.read(work / "runs/.try/t")
    assert trial.saved_step() == 2
    assert trial.status()["state"] == "done"
    assert any("metrics/eval/h/LanguageCrossEntropy" in row for row in trial.metrics())
    assert not (trial.path / "tb").exists()
    first = losses(trial.path)
    assert [step for step, _ in first] == [1, 2]
    assert "no run in" in run_cli(work, "runs", "ls").stdout

    assert train(work, "r.yaml", "--try", "3").returncode == 0, "it begins at step 0 each time"
    again = losses(trial.path)
    assert [step for step, _ in again] == [1, 2, 3]
    assert again[:2] == first


@pytest.mark.parametrize("other", ["--fork", "--dry-run", "--print-config", "folder=x"])
def test_what_does_not_go_with_a_trial(work: Path, other: str) -> None:
    done = run_cli(work, "train", "r.yaml", "--try", "2", other)
    assert done.returncode == 2
    assert "--try trains" in done.stderr
    assert not (work / "runs").exists()


def test_a_trial_in_use_is_not_emptied(work: Path) -> None:
    folder = work / "runs/.try/t"
    folder.mkdir(parents=True)
    running = RunFolder(folder)
    running.take_lock()
    (folder / "kept").touch()
    done = run_cli(work, "train", "r.yaml", "--try", "2")
    running.close()
    assert done.returncode == 2
    assert "is in use" in done.stderr
    assert (folder / "kept").exists()


BARE = """\
name: next
init_from: {source}
data:
  sources: {{code: data/code/train}}
  tokenizer: data/tokenizer
  seq_len: 32
  stages: [{{weights: {{code: 1}}}}]
train: {{duration: 4step, global_batch_tokens: 64, optimizer: {{lr: 1e-3}}}}
"""


@pytest.mark.usefixtures("no_rehearsal")
@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["runs/tiny", "runs/tiny/checkpoints/step-00000020", "runs/tiny/export"])
def test_a_recipe_without_a_model_has_that_of_init_from(tmp_path: Path, source: str) -> None:
    run = tiny_run(tmp_path)
    assert run_cli(tmp_path, "export", "runs/tiny").returncode == 0
    (tmp_path / "next.yaml").write_text(BARE.format(source=source))
    done = run_cli(tmp_path, "train", "next.yaml", "model.max_position_embeddings=64", "--print-config")
    assert done.returncode == 0, done.stderr
    hidden = load(RunConfig, str(run)).config.model.hidden_size
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["hidden_size:", str(hidden), "#", "init_from:", source] in lines
    assert ["max_position_embeddings:", "64", "#", "command", "line"] in lines
    done = run_cli(tmp_path, "train", "next.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert run_cli(tmp_path, "config", "show", "next.yaml").returncode == 0
    assert run_cli(tmp_path, "plan", "flops", "next.yaml").returncode == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "",
            ["there is no section 'model:' to take from init_from: runs/none is none of", "smalti config model MODEL"],
        ),
        ("model: {vocab_size: 320}\n", ["the section 'model:' is not complete", "smalti config model MODEL"]),
    ],
)
@pytest.mark.usefixtures("no_rehearsal")
def test_the_first_error_about_a_missing_model_names_the_command(tmp_path: Path, model: str, words: list[str]) -> None:
    (tmp_path / "next.yaml").write_text(BARE.format(source="runs/none") + model)
    done = run_cli(tmp_path, "train", "next.yaml", "--dry-run")
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
