"""The checkpoints that a run has and had: lost ones are detected, and a failed listing is not an empty one."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from test_track_run import BASE, open_run

from smalti.base.errors import ExitCode, RetryableError, UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.stream.fork import plan_fork
from smalti.track.checkpoints.names import complete, last_saved
from smalti.track.run import RunFolder


def saved(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "COMPLETE").touch()
        (run.checkpoints / "latest").write_text(f"step-{step:08d}\n")
        metrics, events = run.metrics_log(resumed_step=None), run.event_log()
        metrics.write(step, {"loss/train/total": 1.0, "ckpt/save_s": 0.1})
        events.write("checkpoint_saved", step=step, path=str(run.checkpoint(step)), seconds=0.1)
        metrics.close()
        events.close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = open_run(tmp_path)
    saved(run, 5, 10)
    run.close()
    return run


def remove(run: RunFolder, *names: str) -> None:
    for name in names:
        path = run.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "lost",
    [
        ["checkpoints"],
        ["checkpoints/step-00000005", "checkpoints/step-00000010"],
        ["checkpoints/step-00000005", "checkpoints/step-00000010", "checkpoints/latest"],
        ["checkpoints/step-00000005/COMPLETE", "checkpoints/step-00000010/COMPLETE"],
        ["checkpoints/step-00000005", "checkpoints/step-00000010", "events.jsonl", "metrics.jsonl"],
        ["checkpoints", "events.jsonl"],
        ["checkpoints", "metrics.jsonl"],
        ["checkpoints", "config.yaml"],
    ],
)
def test_lost_checkpoints_are_refused_and_nothing_is_changed(tmp_path: Path, run: RunFolder, lost: list[str]) -> None:
    remove(run, *lost)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        open_run(tmp_path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert f"{run.checkpoints} has no complete checkpoint, but this run had one of step 10" in str(caught.value)
    assert "name=NEW_NAME" in str(caught.value)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_the_dry_run_and_a_fork_refuse_lost_checkpoints_too(tmp_path: Path, run: RunFolder) -> None:
    remove(run, "checkpoints")
    config = from_dict(RunConfig, {**BASE, "folder": str(run.path)}).config
    with pytest.raises(UserError, match="this run had one of step 10"):
        run.require_free_or_same(config)
    with pytest.raises(UserError, match="this run had one of step 10"):
        plan_fork(config)


def test_a_run_that_never_saved_begins_again(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    log = run.metrics_log(resumed_step=None)
    log.write(3, {"loss/train/total": 1.0})
    log.close()
    run.close()
    assert last_saved(run.path) is None
    open_run(tmp_path).close()


def test_the_newest_checkpoint_alone_may_be_missing_and_is_named(run: RunFolder) -> None:
    assert run.missing_checkpoint() is None
    remove(run, "checkpoints/step-00000010")
    assert run.missing_checkpoint() == str(run.checkpoint(10))
    events = run.event_log()
    events.write("resumed", step=5, path=str(run.checkpoint(5)))
    events.close()
    assert run.missing_checkpoint() is None, "it resumed from the older one"


def test_a_listing_that_failed_is_not_an_empty_one(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def fails(path: str | Path) -> list[str]:
        if Path(path) == run.checkpoints:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listdir(path)

    assert complete(run.checkpoints) == ["step-00000010", "step-00000005"]
    assert complete(tmp_path / "nothing") == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        for look in (run.saved_step, lambda: open_run(tmp_path)):
            with pytest.raises(RetryableError, match="cannot be listed: Input/output error"):
                look()
    remove(run, "checkpoints")
    run.checkpoints.touch()
    with pytest.raises(RetryableError, match="cannot be listed: Not a directory"):
        run.saved_step()
