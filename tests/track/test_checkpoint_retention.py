"""Which checkpoints are kept: by number, durable, blessed, protected; what a full disk and a kill delete."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_checkpoint import steps_in, write_checkpoint

from smalti.config.durations import LengthConfig, RunLength
from smalti.config.train import KeepConfig
from smalti.track.checkpoints import manifest, retention
from smalti.track.checkpoints.blessed import bless, healthy_since
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, is_marked, mark, registered_in, unmark
from smalti.track.checkpoints.names import BEST, best, complete
from smalti.track.checkpoints.retention import Keep, make_room, prune, remove_leftovers, set_aside_newer

LENGTH = RunLength.of(LengthConfig(duration="1000step", global_batch_tokens=10))


def keep_of(report: Any = lambda **_: None, **values: Any) -> Keep:
    return Keep.of(KeepConfig(**values), LENGTH, report)


def train(folder: Path, steps: range, keep: Keep, *, after: str = "100step", since: int = 0) -> list[int]:
    """Save, delete and bless as a run does; returns what is left."""
    for step in steps:
        write_checkpoint(folder, step)
        prune(folder, step, keep)
        bless(folder, step, since=since, after=after, length=LENGTH)
    return steps_in(folder)


# ---- after a save ---------------------------------------------------------------------------------------------------


def test_a_number_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, 30, 2)
    assert steps_in(tmp_path) == [20, 30, 40], "40 was not written by this attempt"


@pytest.mark.parametrize("every", ["100step", "1e3tok", "0.1run"])
def test_the_first_of_each_interval_is_kept_for_good(tmp_path: Path, every: str) -> None:
    assert train(tmp_path, range(30, 361, 30), keep_of(last=1, every=every, blessed=0)) == [120, 210, 300, 360]


def test_the_best_and_protected_ones_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    (tmp_path / BEST).write_text("step-00000010\n")
    mark(tmp_path / "step-00000020", PROTECTED)
    prune(tmp_path, 40, 1)
    assert steps_in(tmp_path) == [10, 20, 40]


def test_registered_ones_are_kept_by_every_registry(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    ours, theirs = registered_in(tmp_path / "ours/smalti.db"), registered_in(tmp_path / "theirs/smalti.db")
    for name in (ours, theirs):
        mark(tmp_path / "step-00000010", name)
    unmark(tmp_path / "step-00000010", theirs)
    train(tmp_path, range(20, 41, 10), keep_of(last=1, blessed=0))
    assert steps_in(tmp_path) == [10, 40]
    assert retention.roles(tmp_path)["step-00000010"] == ("registered",)
    set_aside_newer(tmp_path / "step-00000000")
    write_checkpoint(tmp_path, 10)
    set_aside_newer(tmp_path / "step-00000000")
    assert (tmp_path / "rejected-step-00000010" / ours).exists(), "an earlier one that is registered remains"


def test_deletions_are_reported(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    train(tmp_path, range(10, 31, 10), keep_of(lambda **event: events.append(event), last=2, blessed=0))
    assert events == [
        {"step": 10, "path": str(tmp_path / "step-00000010"), "reason": "train.checkpoint.keep"}
    ]  # fmt: skip


# ---- blessed --------------------------------------------------------------------------------------------------------


def test_the_newest_blessed_one_is_kept_and_the_next_one_waits(tmp_path: Path) -> None:
    """Saves are closer than ``blessed_after``, so without the waiting one none would live long enough."""
    keep = keep_of(last=2, blessed=1)
    assert train(tmp_path, range(20, 101, 20), keep) == [20, 80, 100]
    assert train(tmp_path, range(120, 161, 20), keep) == [20, 100, 140, 160], "20 is blessed, 100 waits"
    assert train(tmp_path, range(180, 261, 20), keep) == [100, 180, 240, 260]
    blessed = [step for step in steps_in(tmp_path) if is_marked(tmp_path / f"step-{step:08d}", BLESSED)]
    assert blessed == [100]


def test_blessing_needs_the_distance_in_steps_or_tokens(tmp_path: Path) -> None:
    for step in (10, 50, 60):
        write_checkpoint(tmp_path, step)
    assert bless(tmp_path, 59, since=0, after="50step", length=LENGTH) == []
    assert bless(tmp_path, 60, since=20, after="50step", length=LENGTH) == [], "healthy since step 20 only"
    assert bless(tmp_path, 60, since=0, after="500tok", length=LENGTH) == [10]
    assert bless(tmp_path, 60, since=0, after="0.05run", length=LENGTH) == [], "once"


def test_health_is_counted_from_the_resume_after_a_fault() -> None:
    def event(kind: str, step: int = 0) -> dict[str, Any]:
        return {"event": kind, "step": step}

    assert healthy_since([event("resumed", 40), event("rank_died")]) == 0
    assert healthy_since([event("not_finite", 90), event("resumed", 40), event("resumed", 60)]) == 40
    assert healthy_since([event("checkpoint_rejected"), event("resumed", 20), event("not_finite", 90)]) == 20


# ---- before a save --------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """A function that makes the disk of a folder have so many bytes, used by its files alone."""

    def limit(folder: Path, total: int) -> None:
        def usage(path: object) -> Any:
            used = retention.stored_bytes(folder)
            return SimpleNamespace(total=total, used=used, free=total - used)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return limit


def size_of(folder: Path) -> int:
    return retention.stored_bytes(next(folder.glob("step-*")))


def test_a_short_disk_loses_rejected_then_the_oldest_checkpoints(
    tmp_path: Path, disk: Callable[[Path, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30, 40, 50, 60, 70):
        write_checkpoint(tmp_path, step, n_bytes=40_000)
    size = size_of(tmp_path)
    (tmp_path / "step-00000070").rename(tmp_path / "rejected-step-00000070")
    (tmp_path / BEST).write_text("step-00000020\n")
    mark(tmp_path / "step-00000010", PROTECTED)
    mark(tmp_path / "step-00000030", BLESSED)
    deleted: list[dict[str, Any]] = []

    def room_for(n: float) -> list[int]:
        disk(tmp_path, int(retention.stored_bytes(tmp_path) + n * size))
        make_room(tmp_path, report=lambda **event: deleted.append(event))
        return steps_in(tmp_path)

    assert room_for(2.5) == [10, 20, 30, 40, 50, 60]
    assert not caplog.messages
    assert room_for(1.5) == [10, 20, 30, 40, 50, 60]
    assert "a checkpoint needs 41" in caplog.text
    assert room_for(0.5) == [10, 20, 30, 40, 50, 60]
    assert [(event["step"], Path(event["path"]).name) for event in deleted] == [(70, "rejected-step-00000070")]
    assert room_for(0.5) == [10, 20, 30, 50, 60]
    assert deleted[-1]["reason"].startswith("disk space: a checkpoint needs 41")
    assert room_for(0.5) == [10, 20, 30, 60]
    assert room_for(0.5) == [10, 20, 30, 60], "the newest, best, blessed and protected remain"
    assert len(deleted) == 3


def test_nothing_is_deleted_where_that_would_not_be_enough(tmp_path: Path, disk: Callable[[Path, int], None]) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, n_bytes=40_000)
    disk(tmp_path, retention.stored_bytes(tmp_path))
    make_room(tmp_path, 4 * size_of(tmp_path))
    assert steps_in(tmp_path) == [10, 20, 30]
    make_room(tmp_path, 30_000)
    assert steps_in(tmp_path) == [20, 30]
    os.link(tmp_path / "step-00000020/shards/__0_0.distcp", tmp_path / "link")  # deleting it frees half
    disk(tmp_path, retention.stored_bytes(tmp_path))
    make_room(tmp_path, 30_000)
    assert steps_in(tmp_path) == [20, 30]


def test_a_real_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        return  # not possible here; the tests above replace the system's answer
    try:
        for step in range(10, 60, 10):
            make_room(disk / "checkpoints")
            write_checkpoint(disk / "checkpoints", step, n_bytes=1_200_000)
        assert steps_in(disk / "checkpoints") == [30, 40, 50]
        assert manifest.fault(disk / "checkpoints/step-00000050") is None
    finally:
        subprocess.run(["umount", disk], check=True)


def test_leftovers_are_removed(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "nothing")
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-00000020/COMPLETE").unlink()
    (tmp_path / "step-00000040").symlink_to(tmp_path / "elsewhere")
    for name in (
        ".step-00000050.tmp",
        ".step-00000070.fetching",
        ".step-00000060.tmp",
        "step-00000060",
        ".in_loop",
        ".step-00000010.copy",
    ):
        (tmp_path / name / "shards").mkdir(parents=True)
    make_room(tmp_path, 0)
    left = {path.name for path in tmp_path.iterdir()}
    kept = {"step-00000010", "step-00000030", "step-00000040", ".in_loop", ".step-00000010.copy"}
    assert left == {*kept, ".step-00000070.fetching"}, "a command may fetch that one just now"


def _killed_at(action: Callable[[], None], calls: int) -> bool:
    """Run ``action`` in a child that kills itself at the ``calls``-th deletion; return whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [calls]

        def audit(event: str, _: object) -> None:
            if event in ("os.remove", "os.rmdir", "shutil.rmtree"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        import sys

        sys.addaudithook(audit)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_during_deletion_leaves_no_half_checkpoint_and_no_leftovers(tmp_path: Path) -> None:
    """At every deletion of a file or folder, over and over, as a run that is killed and started again."""
    keep, step = Keep(last=2), 0
    calls = list(range(1, 16))
    random.Random(3).shuffle(calls)
    killed = []
    for count in calls:
        for _ in range(3):
            step += 10
            write_checkpoint(tmp_path, step)
        killed.append(_killed_at(lambda: prune(tmp_path, step, keep), count))  # noqa: B023  (runs at once)
        whole = complete(tmp_path)
        assert steps_in(tmp_path)[-2:] == [step - 10, step]
        assert [manifest.fault(tmp_path / name) for name in whole] == [None] * len(whole)
        killed.append(_killed_at(lambda: make_room(tmp_path, 0), max(1, count // 2)))
        assert complete(tmp_path) == whole
    make_room(tmp_path, 0)
    prune(tmp_path, step, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step - 10:08d}", f"step-{step:08d}"]
    assert sum(killed) > len(calls)


# ---- at a resume ----------------------------------------------------------------------------------------------------


def test_marks_of_a_rejected_future_are_not_those_of_the_steps_written_again(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    for name in (BLESSED, PROTECTED):
        mark(tmp_path / "step-00000020", name)
    (tmp_path / BEST).write_text("step-00000030\n")
    moved = set_aside_newer(tmp_path / "step-00000010")
    assert sorted(Path(path).name for path in moved) == ["rejected-step-00000020", "rejected-step-00000030"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rejected-step-00000020").rglob("*")}
    for step in (20, 30, 40):
        write_checkpoint(tmp_path, step)
        prune(tmp_path, step, keep_of(last=1))
    assert best(tmp_path) is None
    assert steps_in(tmp_path) == [10, 40], "10 waits to be blessed"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rejected-step-00000020").rglob("*")} == before
    for _ in range(2):  # rejected again
        write_checkpoint(tmp_path, 20)
        set_aside_newer(tmp_path / "step-00000010")
    names = ("rejected-step-00000020", "rejected-step-00000020.1", "rejected-step-00000020.2")
    assert all((tmp_path / name / "COMPLETE").exists() for name in names), "none is deleted"
    assert (tmp_path / names[0] / PROTECTED).exists()


def test_the_best_checkpoint_before_the_rejected_future_stays(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    (tmp_path / BEST).write_text("step-00000010\n")
    set_aside_newer(tmp_path / "step-00000010")
    assert best(tmp_path) == 10
