"""Copies in the background: nothing is deleted under them, only the newest waits, failures are events."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import checkpoint, digests

from smalti.base.errors import UserError
from smalti.base.objects import Requests
from smalti.track.checkpoints import background
from smalti.track.checkpoints.background import BackgroundCopies
from smalti.track.checkpoints.copies import Copies


class Events:
    """Events of one kind after the other, without a file."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, **fields: Any) -> None:
        """Append one."""
        self.rows.append((kind, fields))

    def steps(self, kind: str) -> list[int]:
        """The steps of the events of a kind."""
        return [fields["step"] for name, fields in self.rows if name == kind]


class Slow:
    """A store that writes no part until it may."""

    def __init__(self, copies: Copies) -> None:
        self.may = threading.Event()
        self.reached = threading.Event()
        self._put = copies._folder.put
        copies._folder.put = self.put  # type: ignore[method-assign]

    def put(self, path: str, data: bytes) -> None:
        """Wait, then write."""
        self.reached.set()
        assert self.may.wait(20)
        self._put(path, data)


def opened(
    tmp_path: Path, check: Callable[[str | None], None] = lambda text: None
) -> tuple[BackgroundCopies, Copies, Events]:
    (tmp_path / "store").mkdir(exist_ok=True)
    copies, events = Copies(str(tmp_path / "store" / "a"), Requests(), part_bytes=16_384), Events()
    return BackgroundCopies(copies, events, config="name: a\n", check=check), copies, events


def finish(copier: BackgroundCopies) -> None:
    end = time.monotonic() + 20
    while copier.is_busy:
        assert time.monotonic() < end
        time.sleep(0.01)
    copier.poll()
    copier.close()


def test_a_checkpoint_that_is_deleted_meanwhile_is_copied_whole(tmp_path: Path) -> None:
    """With room for one checkpoint in the run folder: the first is copied, the second is replaced by the third."""
    copier, copies, events = opened(tmp_path)
    slow = Slow(copies)
    run = tmp_path / "run"
    first = checkpoint(run, 1)
    expected = {1: digests(first)}
    copier.start(first)
    assert slow.reached.wait(10)
    for step in (2, 3):
        path = checkpoint(run, step, keep=1)
        expected[step] = digests(path)
        copier.start(path)
    assert [entry.name for entry in run.iterdir() if entry.name.startswith("step-")] == ["step-00000003"]
    slow.may.set()
    finish(copier)
    assert events.steps("checkpoint_copied") == [1, 3]
    assert copies.complete() == ["step-00000003", "step-00000001"]
    for step in (1, 3):
        assert digests(copies.fetch(step, tmp_path / "other")) == expected[step]
    assert sorted(entry.name for entry in run.iterdir()) == ["step-00000003"], "no links remain"
    fields = events.rows[0][1]
    assert fields["bytes"] == fields["sent_bytes"] > 200_000
    assert fields["seconds"] > 0


@pytest.mark.parametrize("open_files", ["enough", "too few", "no folder for them"])
def test_without_hard_links_open_files_are_read(
    open_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(background.os, "link", no_links)
    if open_files == "too few":
        monkeypatch.setattr(background.Path, "symlink_to", no_links)
    if open_files == "no folder for them":
        monkeypatch.setattr(background.tempfile, "mkdtemp", no_links)
    copier, copies, events = opened(tmp_path)
    slow = Slow(copies)
    path = checkpoint(tmp_path / "run", 1)
    expected = digests(path)
    copier.start(path)
    assert slow.reached.wait(10)
    if open_files == "enough":
        checkpoint(tmp_path / "run", 2, keep=1)
        assert not path.exists()
    monkeypatch.undo()
    slow.may.set()
    finish(copier)
    assert events.steps("checkpoint_copied") == [1]
    assert digests(copies.fetch(1, tmp_path / "other")) == expected
    assert path.exists() == (open_files != "enough"), "the checkpoint itself is never removed"
    assert not list((tmp_path / "run").glob(".copying-*"))


def test_a_failed_copy_is_an_event_and_the_next_is_tried(tmp_path: Path) -> None:
    copier, _, events = opened(tmp_path)
    bad = checkpoint(tmp_path / "run", 1)
    (bad / "shards" / "00000.safetensors").write_bytes(b"changed")
    copier.start(bad)
    end = time.monotonic() + 10
    while copier.is_busy:
        assert time.monotonic() < end
    copier.start(checkpoint(tmp_path / "run", 2))
    finish(copier)
    assert events.steps("checkpoint_copy_failed") == [1]
    assert "does not match its digest" in events.rows[0][1]["reason"]
    assert events.steps("checkpoint_copied") == [2]


def test_a_store_of_another_run_gets_no_copies(tmp_path: Path) -> None:
    def check(text: str | None) -> None:
        raise UserError("holds the checkpoints of another run")

    other, copies, _ = opened(tmp_path)
    other.start(checkpoint(tmp_path / "other-run", 1))
    finish(other)
    copier, _, events = opened(tmp_path, check)
    for step in (2, 3):
        copier.start(checkpoint(tmp_path / "run", step))
        while copier.is_busy:
            time.sleep(0.01)
    finish(copier)
    assert events.steps("checkpoint_copy_failed") == [2, 3]
    assert copies.complete() == ["step-00000001"]


def test_a_stop_does_not_wait_for_the_store_and_the_next_attempt_continues(tmp_path: Path) -> None:
    copier, copies, events = opened(tmp_path)
    path = checkpoint(tmp_path / "run", 1)
    put, count = copies._folder.put, 0

    def some(where: str, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > 4:  # as a store that does not answer
            copies.requests.stop.wait(20)
            copies.requests.wait_for_turn()
        put(where, data)

    copies._folder.put = some  # type: ignore[method-assign]
    copier.start(path)
    while count < 5:
        time.sleep(0.01)
    began_s = time.monotonic()
    copier.close()
    assert time.monotonic() - began_s < 5
    assert events.rows == []
    assert copies.complete() == []
    copier.start(path)  # after the end: nothing happens
    again, _, events = opened(tmp_path)
    again.start(path)
    finish(again)
    assert events.steps("checkpoint_copied") == [1]
    fields = events.rows[0][1]
    assert 0 < fields["sent_bytes"] <= fields["bytes"] - 4 * 16_384
