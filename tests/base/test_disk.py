"""Refusals of the system while something is written, told in our errors."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from smalti.base.disk import writing
from smalti.base.errors import DataError, TryElsewhere


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, TryElsewhere, "the disk is full: /x/y could not be written"),
        (errno.EDQUOT, TryElsewhere, "the disk is full"),
        (errno.EIO, TryElsewhere, "the disk fails"),
        (errno.EEXIST, DataError, "/x/y cannot be written"),
        (errno.EACCES, DataError, "Permission denied"),
    ],
)
def test_by_number(number: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), writing("/x/y"):
        raise OSError(number, os.strerror(number))


def test_several_at_once(tmp_path: Path) -> None:
    """``shutil.copytree`` collects what failed, without a number of its own."""
    with pytest.raises(TryElsewhere, match="the disk is full"), writing(tmp_path):
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
