"""What the system refuses while a file or folder is written, in our words.

Promises: a full or failing disk is RetryableError (free space, then the same again), a place that takes no files is a
DataError; both name the place and the reason, a full disk also its mount point and its free bytes. Anything else of the
system goes through as it is.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smalti.base.errors import DataError, RetryableError
from smalti.base.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG
)  # fmt: skip


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Inside, an OSError about ``place`` becomes one of our errors."""
    try:
        yield
    except OSError as error:
        number = error.errno or _number_in(str(error))
        why = os.strerror(number) if number else str(error)
        if number in _FULL or number == errno.EIO:
            what = "the disk fails" if number == errno.EIO else "the disk is full"
            raise RetryableError(
                f"{what}: {place} could not be written ({reason(error, place)})",
                hint="free space or mend the disk there, then run the same again",
            ) from error
        if number in _NO_PLACE:
            raise DataError(
                f"{place} cannot be written: {error.filename or place}: {why}",
                allowed="a folder that is there or can be made, and that this user may write to",
                hint="name another folder",
            ) from error
        raise


def reason(error: OSError, place: str | Path) -> str:
    """What the system says of ``place``; of a full disk also which one that is, and its free bytes."""
    number = error.errno or _number_in(str(error))
    why = os.strerror(number) if number else str(error)
    return f"{why}: {room(place)}" if number in (errno.ENOSPC, errno.EDQUOT) else why


def room(place: str | Path) -> str:
    """``the disk at /data has 1.2 GiB of 500 GiB free``: of the one that holds ``place``, or would."""
    path = Path(os.path.abspath(place))
    try:
        path = next(one for one in (path, *path.parents) if one.exists())
        mount = next(one for one in (path, *path.parents) if os.path.ismount(one))
        found = shutil.disk_usage(path)
    except (OSError, StopIteration):
        return f"the disk of {place}"
    return f"the disk at {mount} has {format_bytes(found.free)} of {format_bytes(found.total)} free"


def _number_in(text: str) -> int | None:
    """Of an error that stands for several (``shutil.Error``): the first number of the system that it names."""
    known = (*_FULL, errno.EIO, *_NO_PLACE)
    return next((number for number in known if f"[Errno {number}]" in text), None)
