"""Copies that a store keeps: the rules of the run folder, marks that outlive it, and a store that fails."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import checkpoint
from made_copies import opened
from s3_buckets import Bucket

from smalti.base.errors import SmaltiError
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copy_retention import prune_copies, roles
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, REGISTERED, VERIFIED, mark
from smalti.track.checkpoints.names import BEST, step_of
from smalti.track.checkpoints.retention import Keep


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
