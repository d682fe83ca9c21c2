"""What readers ask of a folder of files, near or far."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from smalti.base import cloud
from smalti.base.errors import DataError
from smalti.data.fetch.counts import Counts

Check = Callable[[bytes], object]
"""Raises DataError for bytes that cannot be what was asked for."""


class Damaged(DataError):
    """What a file holds fails its check."""


def require(data: bytes, check: Check | None) -> None:
    """Raises Damaged, with the beginning of ``data``, where ``check`` raises DataError."""
    if check is None:
        return
    try:
        check(data)
    except DataError as error:
        message = f"{error.message}; it begins with {cloud.begins(data)}"
        raise Damaged(message, allowed=error.allowed, hint=error.hint) from error


class Range(NamedTuple):
    """Bytes of one file."""

    name: str
    """Path below the folder, without ``..``."""
    start: int
    length: int


class Share(NamedTuple):
    """Which part of the job's requests falls to this process."""

    rank: int = 0
    world_size: int = 1


class Files(Protocol):
    """The files of one folder. Threads may share it. Nothing is ever listed."""

    where: str
    """Folder or URL, for messages."""
    counts: Counts
    """What reading costs; reading a local disk is not counted."""

    def whole(self, name: str, check: Check | None = None) -> bytes:
        """A whole file: a manifest, an index. What fails its check (a proxy's error page, damaged bytes) is asked for
        again, from each copy. Raises as ``read`` does, and what ``check`` raises."""

    def size(self, name: str) -> int:
        """Bytes of a file, for forms whose index does not say it: one request, by one rank. Raises as ``read``."""

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        """The bytes of each range, in the order asked; fetched together, neighbours in one request.

        Raises DataError for a file that is missing, shorter than asked, or not ours to read; RetryableError where no
        copy answers within ``data.fetch.give_up``.
        """

    def read_again(self, wanted: Range) -> memoryview:
        """The range once more, past every cache and from another copy first: for bytes that failed their check."""

    def close(self) -> None:
        """Close descriptors and connections, and end reads that are under way; a later read opens them again."""


def confined(name: str) -> str:
    """``name``, if it stays below its folder. Raises DataError: names stand in files that others wrote."""
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise DataError(f"the file name '{name}' leads out of its folder", allowed="a path below the folder")
    return name
