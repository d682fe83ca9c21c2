"""Turns operating system errors of a write into Smalti's.

A full or failing disk raises RetryableError, a place that takes no files DataError. Both name the place and the reason,
a full disk also its mount point and free bytes. Other errors pass unchanged.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smalti.base.errors import DataError, RetryableError, SmaltiError
from smalti.base.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG
)  # fmt: skip


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Turn an OSError of writing ``place`` inside the block into a SmaltiError."""
    try:
        yield
    except OSError as error:
        translated = as_smalti_error(error, place, "written")
        if translated is None:
            raise
        raise translated from error


def as_smalti_error(error: OSError, place: str | Path | None, verb: str) -> SmaltiError | None:
    """Return the error of a full or failing disk, or of a ``place`` that cannot be ``verb``; None for others."""
    number = error.errno or _number_in(str(error))
    if number in _FULL or number == errno.EIO:
        what = "the disk fails" if number == errno.EIO else "the disk is full"
        return RetryableError(
            f"{what}: {place or 'a file'} could not be {verb} ({reason(error, place)})",
            hint="free space or repair the disk there, then run the same command again",
        )
    if place is None or number not in _NO_PLACE:
        return None
    is_read_only = number == errno.EROFS
    at = f"{error.filename}: " if error.filename and error.filename != str(place) and not is_read_only else ""
    return DataError(
        f"{place} cannot be {'written' if is_read_only else verb}: {at}{os.strerror(number)}",
        allowed="paths that this user can read, and folders that exist or can be created and take files",
        hint="name another folder (folder=, output=, work= or --output FOLDER, whichever the command takes), or make "
        "this one writable",
    )


def reason(error: OSError, place: str | Path | None) -> str:
    """Return the system's message; for a full disk also its mount point and free bytes."""
    number = error.errno or _number_in(str(error))
    why = os.strerror(number) if number else str(error)
    return f"{why}: {room(place)}" if place is not None and number in (errno.ENOSPC, errno.EDQUOT) else why


def room(place: str | Path) -> str:
    """Return ``the disk at /data has 1.2 GiB of 500 GiB free`` for the disk of ``place``, which need not exist."""
    path = Path(os.path.abspath(place))
    try:
        path = next(folder for folder in (path, *path.parents) if folder.exists())
        mount = next(folder for folder in (path, *path.parents) if os.path.ismount(folder))
        usage = shutil.disk_usage(path)
    except (OSError, StopIteration):
        return f"the disk of {place}"
    return f"the disk at {mount} has {format_bytes(usage.free)} of {format_bytes(usage.total)} free"


def _number_in(text: str) -> int | None:
    """Return the first error number in the text of an error that combines several (``shutil.Error``)."""
    known = (*_FULL, errno.EIO, *_NO_PLACE)
    return next((number for number in known if f"[Errno {number}]" in text), None)
