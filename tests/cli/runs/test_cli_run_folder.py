"""A run folder given to a verb is the run, wherever it is: moved, copied, linked to, or named from elsewhere."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from cli_in_process import run_cli
from tiny_runs import tiny_run
from train_process import train, write_recipe

from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.data.stream.stream import Stream
from smalti.track.run import RunFolder

pytestmark = pytest.mark.usefixtures("no_rehearsal")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """``work/runs/t`` with a checkpoint after 10 steps and none of its tensors, started in ``work``; and a folder
    ``elsewhere``."""
    work = tmp_path / "work"
    write_recipe(work)
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir(work):
        loaded = load(RunConfig, "r.yaml")
        run = RunFolder.open(loaded.config, loaded.origins)
        stream = Stream(loaded.config.data, seed=17, length=loaded.config.length, microbatch_tokens=1)
        run.checkpoint(10).mkdir(parents=True)
        (run.checkpoint(10) / "train_state.json").write_text(json.dumps({"step": 10, "stream": stream.state(10)}))
        (run.checkpoint(10) / "COMPLETE").touch()
        run.close()
    return work


def moved(work: Path) -> Path:
    return (work / "runs/t").rename(work.parent / "elsewhere/was-t")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "given",
    ["was-t", "was-t/", "./was-t", "was-t/config.yaml", "link", "{absolute}", "../elsewhere/was-t",
     "was-t/logs/attempt-1/config.yaml"],
)  # fmt: skip
def test_a_moved_run_resumes_where_it_is(work: Path, given: str) -> None:
    there = moved(work)
    (there.parent / "link").symlink_to(there)
    (there / "logs/attempt-1").mkdir()
    shutil.copy(there / "config.yaml", there / "logs/attempt-1")
    done = run_cli(there.parent, "train", given.format(absolute=there), "train.parallel.ranks=1", "--dry-run")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.endswith("(exists: would resume from step 10)"), first
    assert first.partition("->  ")[2].split()[0].rstrip("/").endswith("link" if given == "link" else "was-t")
    assert f"start from {work}, where it was started" in done.stderr


@pytest.mark.slow
def test_a_copy_is_a_run_of_its_own(work: Path) -> None:
    shutil.copytree(work / "runs/t", work / "runs/copy")
    shutil.rmtree(work / "runs/t/checkpoints")
    assert (
        "t  ->  runs/copy  (exists: would resume from step 10)"
        in run_cli(work, "train", "runs/copy", "--dry-run").stdout
    )
    assert "t  ->  runs/t  (exists: would start at step 0)" in run_cli(work, "train", "runs/t", "--dry-run").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "folder"), [("name=again", "runs/again"), ("folder=new", "new"), ("folder=runs/t", "runs/t")]
)
def test_name_and_folder_make_another_run_of_the_config(work: Path, override: str, folder: str) -> None:
    """Also where the run had been started with a folder of its own."""
    shutil.copytree(work / "runs/t", work / "runs/copy")
    config = work / "runs/copy/config.yaml"
    config.write_text(config.read_text().replace("folder: null", "folder: old/place"))
    done = run_cli(work, "train", "runs/copy", override, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"->  {folder}" in done.stdout.splitlines()[0]


def test_a_recipe_in_a_folder_and_a_base_that_is_a_run_have_the_folder_of_their_name(work: Path) -> None:
    (work / "mine").mkdir()
    shutil.copy(work / "r.yaml", work / "mine/config.yaml")
    (work / "child.yaml").write_text("base: runs/t\nname: child\n")
    with contextlib.chdir(work):
        assert load(RunConfig, "mine").config.run_folder == "runs/t"
        assert load(RunConfig, "child.yaml").config.run_folder == "runs/child"


def test_the_folder_is_no_other_placement_and_not_in_the_config_of_the_run(work: Path) -> None:
    with contextlib.chdir(work):
        for given in ("r.yaml", "runs/t"):
            loaded = load(RunConfig, given)
            run = RunFolder.open(loaded.config, loaded.origins)
            run.close()
            assert not (run.log_folder() / "config.yaml").exists()
        loaded = load(RunConfig, "r.yaml", ["folder=own"])
        RunFolder.open(loaded.config, loaded.origins).close()
        assert "folder: null" in Path("own/config.yaml").read_text()
        assert RunFolder.read("own").config().run_folder == "own"


@pytest.mark.slow
def test_what_is_typed_begins_where_it_is_typed(work: Path) -> None:
    there = moved(work)
    (work / "tokens/a").rename(there.parent / "a")
    done = run_cli(there.parent, "train", "was-t", "data.sources.a=a", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would resume from step 10" in done.stdout


@pytest.mark.slow
def test_a_project_that_was_moved_as_a_whole_is_read_where_it_is(work: Path) -> None:
    new = work.rename(work.parent / "new")
    done = run_cli(new, "train", "runs/t", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "t  ->  runs/t  (exists: would resume from step 10)" in done.stdout


def test_data_that_is_neither_there_nor_here_is_named(work: Path) -> None:
    there = moved(work)
    (work / "tokens/h").rename(work / "tokens/gone")
    done = run_cli(there.parent, "train", "was-t", "--dry-run")
    assert done.returncode == 2
    assert f"data.heldout.h = tokens/h does not exist: was-t was started in {work}" in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [["runs", "show"], ["runs", "report"], ["data", "explain", "--step", "3"], ["train", "--print-config"]],
)
def test_other_verbs_take_a_moved_run(work: Path, command: list[str]) -> None:
    there = moved(work)
    done = run_cli(there.parent, *command, "was-t")
    assert done.returncode == 0, done.stderr
    assert not (there.parent / "runs").exists()


def test_a_moved_run_is_exported_measured_and_compared_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "work")
    with contextlib.chdir(tmp_path / "work"):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(f"{tmp_path}/work/data", "data"))
        (run / "provenance.json").write_text(json.dumps({"directory": str(Path.cwd())}))
    there = run.rename(tmp_path / "was-tiny")
    assert (done := run_cli(tmp_path, "export", "was-tiny")).returncode == 0, done.stderr
    quick = ("tasks=[heldout]", "resamples=20")
    assert (done := run_cli(tmp_path, "eval", "run", "was-tiny", *quick)).returncode == 0, done.stderr
    assert (done := run_cli(tmp_path, "chat", "was-tiny", "--prompt", "a", "--max-tokens", "2")).returncode == 0, (
        done.stderr
    )
    shutil.copytree(there, tmp_path / "copy")
    done = run_cli(tmp_path, "runs", "diff", "was-tiny", "copy")
    assert done.returncode == 0, done.stderr
    assert "was-tiny" in done.stdout


@pytest.mark.exhaustive
def test_a_moved_run_is_trained_on_and_forked_by_real_ranks_from_elsewhere(work: Path) -> None:
    """Only real processes show that the ranks find the folder and the data that the command has found."""
    shutil.rmtree(work / "runs")
    assert (done := train(work, "r.yaml", "train.duration=6step")).returncode == 0, done.stderr
    there = moved(work)
    done = train(there.parent, "was-t", "train.duration=9step", "--fork")
    assert done.returncode == 0, done.stderr
    assert "was-t: forked at step 6" in done.stderr
    assert RunFolder.read(there).saved_step() == 9
    done = train(there.parent, "was-t/")
    assert "(already finished)" in done.stderr
    assert not (there.parent / "runs").exists()
    assert not (work / "runs/t").exists()
