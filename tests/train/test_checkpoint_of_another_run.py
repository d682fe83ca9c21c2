"""A checkpoint of another run of the same layout, put into a run folder under its step, is not used."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import toy_run

from smalti.base.errors import DataError, SmaltiError
from smalti.config.fork import other_settings
from smalti.distributed.checkpoint.source import open_source
from smalti.track.checkpoint_places import open_place
from smalti.track.checkpoints import manifest
from smalti.track.run import RunFolder
from smalti.train import build, fit

pytestmark = pytest.mark.slow
DIFFERS = "it is of another run; what differs (there -> here): train.optimizer.lr: 0.004 -> 0.003"


def _trained(root: Path, name: str, **train: Any) -> RunFolder:
    """A run of 6 steps with checkpoints of steps 2, 4 and 6, in ``root/NAME``; all read the same tokens."""
    config = toy_run.config(root, duration="6step", checkpoint={"every": "2step", "keep": 9}, **train)
    config = config.model_copy(update={"name": name, "folder": str(root / name)})
    fit(build(config))
    return RunFolder.read(root / name)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """A run whose last checkpoint was replaced by that of a run with another learning rate."""
    root = tmp_path_factory.mktemp("both")
    run, other = _trained(root, "run"), _trained(root, "other", optimizer={"lr": 4e-3})
    shutil.rmtree(run.checkpoint(6))
    shutil.copytree(other.checkpoint(6), run.checkpoint(6))
    return run, other


def test_it_is_not_verified_exported_or_copied(both: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    run, _ = both
    place = open_place(str(run.path))
    faults = {name: place.verify(name, lambda *_: None) for name in place.named([])}
    assert faults == {"step-00000002": None, "step-00000004": None, "step-00000006": DIFFERS}
    with pytest.raises(SmaltiError, match=r"optimizer\.lr: 0\.004 -> 0\.003"):
        open_source(run.path, run.config(), None, step=6)
    with pytest.raises(DataError, match="of another run"):
        place.copy("step-00000006", str(tmp_path / "copies"), lambda *_: None)
    assert not (tmp_path / "copies").exists()


def test_a_folder_takes_the_checkpoints_of_one_run(both: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    run, other = (open_place(str(each.path)) for each in both)
    target = str(tmp_path / "copies")
    for name in ("step-00000002", "step-00000004", "step-00000004"):
        run.copy(name, target, lambda *_: None)
    with pytest.raises(DataError, match="has checkpoints of another run"):
        other.copy("step-00000006", target, lambda *_: None)
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_folder_of_copies_is_compared_with_the_run_that_is_exported(both: tuple[RunFolder, RunFolder]) -> None:
    run, other = both
    assert open_source(other.path, other.config(), other.checkpoints, step=4).step == 4
    with pytest.raises(DataError, match="of another run"):
        open_source(run.path, run.config(), other.checkpoints, step=4)


def test_a_resume_passes_it_over(both: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    before = both[0]
    shutil.copytree(before.path, tmp_path / "run")
    job = build(before.config().model_copy(update={"folder": str(tmp_path / "run")}))
    assert job.state.step == 4
    (rejected,) = [each for each in RunFolder(tmp_path / "run").events() if each["event"] == "checkpoint_rejected"]
    assert rejected["reason"] == DIFFERS
    job.folder.close()


def test_a_run_whose_config_is_damaged_is_not_verified(both: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    shutil.copytree(both[1].path, tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(text[:100])
    reason = open_place(str(tmp_path / "run")).verify("step-00000004", lambda *_: None)
    assert reason is not None
    assert reason.startswith("the config of its run cannot be read")


def test_names_and_what_a_fork_changes_are_no_difference(both: tuple[RunFolder, RunFolder]) -> None:
    run, other = both
    config = run.config()
    assert other_settings(config.model_copy(update={"name": "renamed"}), config) == []
    forked = config.model_copy(update={"data": config.data.model_copy(update={"history": ("a fork",)})})
    (line,) = other_settings(other.config(), config)
    assert line.startswith("train.optimizer.lr")
    assert other_settings(other.config(), forked) == []


def test_checkpoints_without_a_config_are_of_the_run(both: tuple[RunFolder, RunFolder]) -> None:
    run, other = both
    saved = manifest.read_state(other.checkpoint(4))
    text = (run.path / "config.yaml").read_text()
    assert manifest.of_another_run(saved, text, "") == DIFFERS
    del saved[manifest.CONFIG]
    assert manifest.of_another_run(saved, text, "") is None
