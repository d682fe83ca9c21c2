"""Reads the files of a local folder with pread: a truncated file is an error that names it, not a SIGBUS."""

import errno
import os
from collections.abc import Sequence

from smalti.base.errors import DataError, RetryableError
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.descriptors import OpenFile, OpenFiles
from smalti.data.fetch.files import Check, Files, Range, confined, require


class LocalFiles:
    """A local folder. What cannot be read from it is read from its mirrors, if it has any."""

    def __init__(self, folder: str, counts: Counts, mirrors: Files | None = None) -> None:
        self.where = folder
        self.counts = counts
        self.mirrored = mirrors is not None
        self._mirrors = mirrors
        self._open: OpenFiles[str] = OpenFiles()
        self._again: set[Range] = set()
        """Ranges that were read again from a mirror; next time they are read from the disk first."""

    def whole(self, name: str, check: Check | None = None) -> bytes:
        """Read a whole file."""
        try:
            opened = self._opened(name)
            data = bytes(self._pread(opened, Range(name, 0, os.fstat(opened.descriptor).st_size)))
            require(data, check)
            return data
        except (DataError, RetryableError):
            if self._mirrors is None:
                raise
            return self._mirrors.whole(name, check)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        path = f"{self.where}/{confined(name)}"
        try:
            return os.stat(path).st_size
        except OSError as error:
            if self._mirrors is None:
                raise _read_error(path, error) from error
            return self._mirrors.size(name)

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        """Read ranges, in the order given."""
        return [self._read_or_mirror(part) for part in wanted]

    def read_again(self, wanted: Range) -> memoryview:
        """Read a range again, alternately from a mirror and from the disk, whose error may be transient."""
        if self._mirrors is None:
            return self._read(wanted)
        from_disk = wanted in self._again
        (self._again.discard if from_disk else self._again.add)(wanted)
        readings = [self._mirrors.read_again, self._read]
        first, second = reversed(readings) if from_disk else readings
        try:
            return first(wanted)
        except (DataError, RetryableError):
            return second(wanted)

    def close(self) -> None:
        """Close descriptors, which are opened again by the next read."""
        self._open.close()
        if self._mirrors is not None:
            self._mirrors.close()

    def _read_or_mirror(self, wanted: Range) -> memoryview:
        try:
            return self._read(wanted)
        except (DataError, RetryableError):
            if self._mirrors is None:
                raise
            return self._mirrors.read([wanted])[0]

    def _read(self, wanted: Range) -> memoryview:
        return self._pread(self._opened(wanted.name), wanted)

    def _opened(self, name: str) -> OpenFile:
        opened = self._open.by_key.get(name)
        if opened is None:
            path = f"{self.where}/{confined(name)}"
            try:
                opened = OpenFile(path)
            except OSError as error:
                raise _read_error(path, error) from error
            self._open.keep(name, opened)
        return opened

    def _pread(self, opened: OpenFile, wanted: Range) -> memoryview:
        path = f"{self.where}/{wanted.name}"
        view = memoryview(bytearray(wanted.length))
        done = 0
        while done < wanted.length:
            try:
                n = os.preadv(opened.descriptor, [view[done:]], wanted.start + done)
            except OSError as error:
                raise _read_error(path, error) from error
            if n == 0:
                raise _short_file(path, wanted, os.fstat(opened.descriptor).st_size)
            done += n
        return view


def _short_file(path: str, wanted: Range, n_bytes: int) -> DataError:
    return DataError(
        f"{path} has only {n_bytes:,} bytes; bytes {wanted.start:,} to {wanted.start + wanted.length:,} are needed",
        hint="the file is truncated: copy it again",
    )


def _read_error(path: str, error: OSError) -> DataError | RetryableError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DataError(f"{path} does not exist", hint="copy the folder again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EISDIR):
        return DataError(f"{path} cannot be read: {error.strerror}")
    return RetryableError(f"{path} cannot be read: {error.strerror}", hint="check the disk of this machine")
