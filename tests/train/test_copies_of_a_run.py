"""``train.checkpoint.save_to``: each checkpoint is copied, and a run folder that was lost continues from the copies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from s3_buckets import bucket
from s3_server import moto_server

from smalti.base.errors import DataError, UserError
from smalti.base.objects import Requests
from smalti.config.load import dump, from_dict
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.track.checkpoints import manifest, marks
from smalti.track.checkpoints.copies import Copies
from smalti.track.run import RunFolder, config_text
from smalti.train import build, fit


def _config(root: Path, ranks: int = 1, **train: Any) -> RunConfig:
    (root / "store").mkdir(exist_ok=True)
    save_to = str(root / "store")
    return toy_run.config(root, checkpoint={"every": "4step", "save_to": save_to}, parallel={"ranks": ranks}, **train)


def _fit(rank: int, config: RunConfig, fork: bool = False) -> int:
    job = build(config, fork=fork)
    fit(job)
    return job.state.step


def _error(rank: int, config: RunConfig, kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        _fit(rank, config)
    return str(raised.value)


def _events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(config.run_folder).events() if event["event"] == kind]


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return checkpoint.read_model(str(checkpoint.newest(f"{config.run_folder}/checkpoints")))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["checkpoints", "run folder"])
def test_a_run_whose_disk_was_lost_continues_from_the_store_to_the_bit(lost: str, tmp_path: Path) -> None:
    config = _config(tmp_path, ranks=2)
    run_ranks(2, toy_run.fit_until, config, 10)
    copied = {event["step"] for event in _events(config, "checkpoint_copied")}
    assert copied
    shutil.rmtree(Path(config.run_folder) / ("checkpoints" if lost == "checkpoints" else ""))
    assert run_ranks(2, _fit, config) == [24, 24]
    [restored] = _events(config, "checkpoint_restored")
    assert restored["step"] in (*copied, 10)
    assert [event["step"] for event in _events(config, "resumed")][-1] == restored["step"]
    assert {event["step"] for event in _events(config, "checkpoint_copied")} >= {24}, "the end waits for the last copy"
    other = toy_run.config(tmp_path / "other", parallel={"ranks": 2})
    run_ranks(2, _fit, other)
    assert all(torch.equal(tensor, _weights(other)[name]) for name, tensor in _weights(config).items())


def test_copies_that_are_not_to_be_kept_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    checkpoint = {
        "every": "2step",
        "keep": 1,
        "save_to": str(tmp_path / "store"),
        "save_to_keep": {"last": 1, "every": "4step", "blessed": 0},
    }
    config = toy_run.config(tmp_path, checkpoint=checkpoint, duration="10step")
    run_ranks(1, _fit, config)
    left = {int(path.name[5:]) for path in (tmp_path / "store/dense").iterdir()}
    copied = {event["step"] for event in _events(config, "checkpoint_copied")}
    deleted = {event["step"] for event in _events(config, "checkpoint_deleted") if "store" in event["path"]}
    assert left == copied - deleted
    assert 10 in left
    assert not {2, 6} & left, "a newer one is complete: neither the newest nor the first of 4 steps"


@pytest.mark.slow
def test_another_run_and_a_missing_store_are_named_and_not_taken_for_no_checkpoint(tmp_path: Path) -> None:
    config = _config(tmp_path, duration="4step")
    run_ranks(1, _fit, config)
    tree = config.model_dump(mode="json") | {"seed": 18, "folder": str(tmp_path / "runs" / "again")}
    [message] = run_ranks(1, _error, from_dict(RunConfig, tree).config, UserError)
    assert "store/dense holds the checkpoints of another run" in message
    assert "seed: 17 -> 18" in message
    shutil.move(tmp_path / "store", tmp_path / "away")
    tree = config.model_dump(mode="json") | {"folder": str(tmp_path / "runs" / "again")}
    [message] = run_ranks(1, _error, from_dict(RunConfig, tree).config, DataError)
    assert "cannot be listed: there is no folder" in message
    assert not _events(from_dict(RunConfig, tree).config, "checkpoint_saved")


@pytest.mark.slow
def test_a_forked_run_is_copied_on_and_restored_by_its_own_config(tmp_path: Path) -> None:
    config = _config(tmp_path, duration="8step")
    run_ranks(1, _fit, config)
    forked = _config(tmp_path, duration="16step")
    assert run_ranks(1, _fit, forked, True) == [16]
    assert _events(config, "checkpoint_copy_failed") == []
    assert {event["step"] for event in _events(config, "checkpoint_copied")} >= {8, 16}
    recorded = RunFolder(config.run_folder).config().model_copy(update={"folder": config.folder})
    shutil.rmtree(config.run_folder)
    [message] = run_ranks(1, _error, forked, UserError)
    assert "data.history.0: {duration: 8step" in message
    assert "it was forked: give 'smalti train' its config.yaml" in message
    assert run_ranks(1, _fit, recorded) == [16]
    assert [event["step"] for event in _events(config, "checkpoint_restored")] == [16]


@pytest.mark.exhaustive
def test_kill_9_of_all_processes_while_copies_are_sent_to_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, its disk lost, killed again: the run ends, and every copy in the store verifies."""
    config = toy_run.config(
        tmp_path, duration="60step", checkpoint={"every": "5step", "save_to": "s3://bucket/runs"}, parallel={"ranks": 2}
    )
    (tmp_path / "recipe.yaml").write_text(dump(config))
    folder = RunFolder(config.run_folder)

    def train(kill_after: int | None) -> int:
        run = subprocess.Popen(
            [sys.executable, "-m", "smalti", "train", str(tmp_path / "recipe.yaml")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while kill_after is not None and len(_events(config, "checkpoint_copied")) < kill_after:
            assert run.poll() is None
            time.sleep(0.02)
        if kill_after is not None:
            os.killpg(run.pid, signal.SIGKILL)
        return run.wait()

    with moto_server() as moto, bucket(moto, monkeypatch) as s3:
        s3.direct.create_bucket(Bucket="bucket")
        s3.proxy.faults.unavailable = s3.proxy.faults.cut = 0.05
        assert train(3) == -signal.SIGKILL
        shutil.rmtree(folder.path)
        assert train(2) == -signal.SIGKILL
        assert train(None) == 0
        s3.proxy.faults.unavailable = s3.proxy.faults.cut = 0
        assert _events(config, "checkpoint_restored")
        copies = Copies("s3://bucket/runs/dense", Requests(5000.0))
        steps = [int(name.removeprefix("step-")) for name in copies.complete()]
        assert steps[0] == 60
        listed = s3.direct.list_objects_v2(Bucket="bucket")["Contents"]
        assert {entry["Key"].split("/")[2] for entry in listed} == set(copies.complete()), "no leftovers"
        for step in steps:
            assert manifest.fault(copies.fetch(step, tmp_path / "fetched")) is None


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"save_to=https://host/a cannot be written"):
        toy_run.config(tmp_path, checkpoint={"save_to": "https://host/a"})
    with pytest.raises(UserError, match="save_requests_per_s has no effect without save_to"):
        toy_run.config(tmp_path, checkpoint={"save_requests_per_s": 5.0})


# ---- where the run folder has checkpoints ----------------------------------------------------------------------------


def _trained(root: Path) -> tuple[RunConfig, RunFolder, Copies]:
    """A run that is done, with checkpoints of the steps 4 and 8 in its folder and in the store."""
    config = _config(root, duration="8step")
    run_ranks(1, _fit, config)
    folder = RunFolder(config.run_folder)
    copies = Copies(str(root / "store" / config.name), Requests(5000.0))
    for step in (4, 8):
        copies.upload(folder.checkpoint(step), config=config_text(config))
    return config, folder, copies


def _flip(checkpoint: Path) -> None:
    file = next(path for path in sorted(checkpoint.glob("shards/*")) if ".safetensors" in path.name)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def _resumed(config: RunConfig) -> list[int]:
    return [event["step"] for event in _events(config, "resumed")]


def _rejected(config: RunConfig) -> list[str]:
    return [event["path"] for event in _events(config, "checkpoint_rejected")]


def test_where_all_of_the_disk_are_damaged_the_newest_copy_is_used(tmp_path: Path) -> None:
    config, folder, _ = _trained(tmp_path)
    marks.mark(folder.checkpoint(8), marks.PROTECTED)
    for step in (4, 8):
        _flip(folder.checkpoint(step))
    assert run_ranks(1, _fit, config) == [8]
    assert _rejected(config) == [str(folder.checkpoint(8))]
    assert _resumed(config) == [8]
    assert manifest.fault(folder.checkpoint(8)) is None
    assert marks.is_marked(folder.checkpoint(8), marks.PROTECTED), "marks hold for what was fetched"
    assert _events(config, "checkpoint_copy_failed") == []


def test_copies_that_are_newer_than_an_old_disk_are_used_and_a_lost_store_is_not_waited_for(tmp_path: Path) -> None:
    config, folder, _ = _trained(tmp_path)
    shutil.rmtree(folder.checkpoint(8))
    (folder.path / "events.jsonl").unlink()
    (folder.checkpoints / "latest").write_text("step-00000004\n")
    assert run_ranks(1, _fit, config) == [8]
    assert [event["step"] for event in _events(config, "checkpoint_restored")] == [8]
    assert _resumed(config) == [8]
    assert _events(config, "checkpoint_copy_failed") == []
    shutil.move(tmp_path / "store", tmp_path / "away")
    assert run_ranks(1, _fit, config) == [8]


def test_a_fork_does_not_use_newer_copies_of_what_it_has_left(tmp_path: Path) -> None:
    config, folder, _ = _trained(tmp_path)
    shutil.rmtree(folder.checkpoint(8))
    (folder.path / "events.jsonl").unlink()
    forked = _config(tmp_path, duration="12step")
    assert run_ranks(1, _fit, forked, True) == [12]
    assert _resumed(config) == [4]
    assert _events(config, "checkpoint_restored") == []


def test_a_copy_that_is_damaged_as_the_checkpoint_is_set_aside_and_its_step_copied_again(tmp_path: Path) -> None:
    config, folder, copies = _trained(tmp_path)
    copies.mark("step-00000008", marks.PROTECTED)
    copies.mark("step-00000008", marks.BLESSED)
    for place in (folder.checkpoint(8), tmp_path / "store/dense/step-00000008"):
        _flip(place)
    assert copies.fault("step-00000008") is not None
    assert run_ranks(1, _fit, config) == [8]
    url = str(tmp_path / "store/dense/step-00000008")
    assert _rejected(config) == [str(folder.checkpoint(8)), url]
    assert _resumed(config) == [4]
    assert [event["path"] for event in _events(config, "checkpoint_deleted")] == [url]
    assert _events(config, "checkpoint_copy_failed") == []
    assert copies.fault("step-00000008") is None
    assert copies.marks("step-00000008") == {marks.PROTECTED}
