"""Copies that a store keeps: the rules of the run folder, marks that outlive it, and a store that fails."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import checkpoint
from made_copies import opened
from s3_buckets import Bucket

from smalti.base.errors import DataError, SmaltiError, UserError
from smalti.track.checkpoint_places import OfStore
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copy_retention import Best, prune_copies, read_best, roles, set_aside
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, REGISTERED, VERIFIED, mark
from smalti.track.checkpoints.names import BEST, folder_name, step_of
from smalti.track.checkpoints.retention import Keep
from smalti.track.events import EventLog


def _copied(folder: Path, url: str, *steps: int) -> Copies:
    copies = opened(url)
    for step in steps:
        copies.upload(checkpoint(folder, step, shards=1, shard_bytes=100))
    return copies


def _steps(copies: Copies) -> list[int]:
    return sorted(map(step_of, opened(copies.url).complete()))


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_the_rules_of_the_folder_hold_in_the_store(kind: str, tmp_path: Path, s3: Bucket) -> None:
    folder, url = tmp_path / "run", s3.url if kind == "s3" else f"memory://{tmp_path.name}"
    copies = _copied(folder, url, 10, 20, 30, 40, 50, 60, 70)
    mark(folder / "step-00000010", PROTECTED)
    mark(folder / "step-00000020", f"{REGISTERED}-01234567")
    mark(folder / "step-00000040", BLESSED)
    mark(folder / "step-00000030", VERIFIED)
    (folder / BEST).write_text("step-00000050\n")
    reported: list[dict[str, Any]] = []
    keep = Keep(1, blessed=1, report=lambda **event: reported.append(event))
    prune_copies(copies, folder, 60, keep)
    # 40 blessed, 50 the next that can be and the best, 60 the newest that this attempt knows, 70 of another one
    assert _steps(copies) == [10, 20, 40, 50, 60, 70]
    assert [(event["step"], event["path"]) for event in reported] == [(30, f"{url}/step-00000030")]
    assert all("step-00000030" not in key for key in s3.objects())

    shutil.rmtree(folder)  # the marks are in the store now
    prune_copies(opened(url), folder, 70, Keep(1))
    assert _steps(copies) == [10, 20, 70]
    assert roles(opened(url)) == {
        "step-00000070": ("newest",), "step-00000020": ("registered",), "step-00000010": ("protected",)
    }  # fmt: skip
    copies.mark("step-00000010", PROTECTED, off=True)
    prune_copies(opened(url), folder, 70, Keep(1))
    assert _steps(copies) == [20, 70]
    assert opened(url).fault("step-00000020") is None


def test_marks_remain_when_a_later_step_is_uploaded(tmp_path: Path) -> None:
    copies = _copied(tmp_path / "run", f"memory://{tmp_path.name}", 10)
    copies.mark("step-00000010", PROTECTED)
    copies.upload(checkpoint(tmp_path / "run", 20))
    assert copies.marks("step-00000010") == {PROTECTED}
    assert copies.newest(tmp_path / "other") is not None
    copies.remove("step-00000010")
    copies.upload(tmp_path / "run/step-00000010")
    assert copies.marks("step-00000010") == set(), "a copy that was deleted has no marks"


def test_a_store_that_fails_deletes_nothing_and_raises(tmp_path: Path, s3: Bucket) -> None:
    copies = _copied(tmp_path / "run", s3.url, 10, 20)
    before = s3.objects()
    s3.proxy.faults.unavailable = 1.0
    with pytest.raises(SmaltiError):
        prune_copies(opened(s3.url, give_up_s=0.2), tmp_path / "run", 20, Keep(1))
    s3.proxy.faults.unavailable = 0.0
    assert s3.objects() == before
    prune_copies(copies, tmp_path / "run", 20, Keep(1))
    assert _steps(copies) == [20]


def _best(run: Path, step: int, value: float) -> Path:
    """Record the best checkpoint of a run folder, as training does; returns the folder of the checkpoints."""
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BEST).write_text(f"{folder_name(step)}\n")
    EventLog(run).write("checkpoint_best", step=step, metric="metrics/eval/loss", value=value)
    return folder


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_the_best_copy_outlives_the_run_folder_until_there_is_a_better_one(
    kind: str, tmp_path: Path, s3: Bucket
) -> None:
    url = s3.url if kind == "s3" else f"memory://{tmp_path.name}"
    folder = _best(tmp_path / "run", 20, 2.0)
    _copied(folder, url, 10, 20, 30)
    prune_copies(opened(url), folder, 30, Keep(1))
    assert _steps(opened(url)) == [20, 30]
    shutil.rmtree(folder.parent)

    prune_copies(opened(url), folder, 30, Keep(1))  # nothing is known here
    folder = _best(tmp_path / "restored", 40, 2.5)  # the first that the restored run has compared
    _copied(folder, url, 40, 50)
    prune_copies(opened(url), folder, 50, Keep(1))
    assert _steps(opened(url)) == [20, 40, 50]
    assert roles(opened(url))["step-00000020"] == ("best",)
    assert OfStore(url).named(["best"]) == ["step-00000020"]
    with pytest.raises(UserError, match="is kept as best"):
        OfStore(url).check_deletable(["step-00000020"], force=False)

    _best(tmp_path / "restored", 50, 1.5)
    prune_copies(opened(url), folder, 50, Keep(1))
    assert _steps(opened(url)) == [50]
    assert read_best(opened(url)) == Best("step-00000050", "metrics/eval/loss", 1.5)


def test_a_damaged_copy_that_is_set_aside_is_sent_again_whole(tmp_path: Path) -> None:
    older, path = (checkpoint(tmp_path / "run", step) for step in (1, 2))
    root = tmp_path / "store"
    copies = opened(str(root))
    for each in (older, path):
        copies.upload(each)
    part = next((root / path.name / "shards").iterdir())
    data = bytearray(part.read_bytes())
    data[3] ^= 1
    part.write_bytes(data)
    for name in (PROTECTED, BLESSED):
        copies.mark(path.name, name)
    (root / "best").write_text(json.dumps({"name": path.name, "metric": "a", "value": 1.0}))
    set_aside(copies, path.name)
    assert copies.complete() == ["step-00000001"]
    assert not (root / "best").exists()
    copies.upload(checkpoint(tmp_path / "run", 3))
    assert part.exists(), "its parts remain: it is protected"
    copied = copies.upload(path)
    assert copied.sent_bytes == copied.bytes
    assert opened(str(root)).fault(path.name) is None
    assert copies.marks(path.name) == {PROTECTED}
    assert not (root / path.name / "REJECTED").exists()


def test_an_unreadable_best_deletes_nothing(tmp_path: Path, s3: Bucket) -> None:
    folder = _best(tmp_path / "run", 10, 2.0)
    copies = _copied(folder, s3.url, 10, 20, 30)
    s3.proxy.refuse = lambda head, key: (
        (503, "SlowDown") if head.partition("\r")[0].endswith("/best HTTP/1.1") else None
    )
    with pytest.raises(SmaltiError):
        prune_copies(opened(s3.url, give_up_s=0.2), folder, 30, Keep(1))
    s3.proxy.refuse = lambda head, key: None
    s3.write("runs/a/best", b"{\x00")
    with pytest.raises(DataError, match="best is not valid"):
        prune_copies(copies, folder, 30, Keep(1))
    assert _steps(copies) == [10, 20, 30]


def test_a_copy_that_is_protected_during_a_prune_is_kept(tmp_path: Path, s3: Bucket) -> None:
    folder = tmp_path / "run"
    copies = _copied(folder, s3.url, 10, 20, 30, 40)

    def protect(step: int, **_: Any) -> None:
        assert step == 20, "the first to be deleted, after all marks were read for blessed=1"
        opened(s3.url).mark("step-00000030", PROTECTED)

    prune_copies(copies, folder, 40, Keep(1, blessed=1, report=protect))
    assert _steps(copies) == [10, 30, 40]
