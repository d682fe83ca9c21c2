"""Errors of the operating system during a write become Smalti's errors."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from smalti.base.disk import reason, room, writing
from smalti.base.errors import DataError, RetryableError


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, RetryableError, "the disk is full: /x/y could not be written"),
        (errno.EDQUOT, RetryableError, "the disk is full"),
        (errno.EIO, RetryableError, "the disk fails"),
        (errno.EEXIST, DataError, "/x/y cannot be written"),
        (errno.EACCES, DataError, "Permission denied"),
    ],
)
def test_by_number(number: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), writing("/x/y"):
        raise OSError(number, os.strerror(number))


def test_a_read_only_disk_is_said_of_the_place_and_not_of_a_temporary_file() -> None:
    with pytest.raises(DataError, match=r"^/x/y cannot be written: Read-only file system\n") as caught, writing("/x/y"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/x/.y.7.tmp")
    assert "make this one writable" in str(caught.value.hint)


def test_several_at_once(tmp_path: Path) -> None:
    """``shutil.copytree`` collects what failed, without a number of its own."""
    with pytest.raises(RetryableError, match="the disk is full"), writing(tmp_path):
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])


def test_others_go_through() -> None:
    with pytest.raises(ConnectionResetError), writing("/x"):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    with pytest.raises(ValueError, match="ours"), writing("/x"):
        raise ValueError("ours")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match="cannot be written"), writing(place):
            place.mkdir()


def test_a_full_disk_is_named_with_its_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in (tmp_path, Path("/")))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 4096))
    place = tmp_path / "not" / "yet" / "there"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    named = f"the disk at {tmp_path} has 4.0 KiB of 1.0 TiB free"
    assert reason(full, place) == f"No space left on device: {named}"
    assert reason(OSError(errno.EIO, "x"), place) == os.strerror(errno.EIO)
    with pytest.raises(RetryableError, match=f"{place} could not be written .*{named}"), writing(place):
        raise full


def test_a_disk_that_cannot_be_asked_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert room("/a/b") == "the disk of /a/b"
