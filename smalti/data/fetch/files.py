"""The interface ``Files``: reads the files of a folder, local or in a store."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from smalti.base import cloud
from smalti.base.errors import DataError
from smalti.data.fetch.counts import Counts

Check = Callable[[bytes], object]
"""A function that raises DataError if bytes cannot be the requested content."""


class Damaged(DataError):
    """The content of a file failed its check."""


def require(data: bytes, check: Check | None) -> None:
    """Check ``data``. Raises Damaged, which shows the beginning of ``data``, if ``check`` raises DataError."""
    if check is None:
        return
    try:
        check(data)
    except DataError as error:
        message = f"{error.message}; it begins with {cloud.begins(data)}"
        raise Damaged(message, allowed=error.allowed, hint=error.hint) from error


class Range(NamedTuple):
    """A range of bytes of one file."""

    name: str
    """Path below the folder, without ``..``."""
    start: int
    length: int


class Share(NamedTuple):
    """The rank of this process among those that share the job's request rate."""

    rank: int = 0
    world_size: int = 1


class Files(Protocol):
    """The files of one folder. Thread-safe. Never lists the folder."""

    where: str
    """Folder or URL, for messages."""
    counts: Counts
    """Counters of the cost of reading; reads of a local disk are not counted."""

    def whole(self, name: str, check: Check | None = None) -> bytes:
        """Read a whole file, such as a manifest or an index.

        Content that fails ``check`` (a proxy's error page, damaged bytes) is requested again, from each replica. Raises
        the errors of ``read`` and of ``check``.
        """

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, with one request. Raises the errors of ``read``."""

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        """Read ranges, in the order given; they are fetched concurrently, and neighbours share a request.

        Raises DataError for a file that is missing, too short, or not readable with these credentials; RetryableError
        if no replica responds within ``data.fetch.give_up``.
        """

    def read_again(self, wanted: Range) -> memoryview:
        """Read a range that failed its check again: without the cache, and from another replica first."""

    def close(self) -> None:
        """Close descriptors and connections and cancel pending reads; a later read opens them again."""


def confined(name: str) -> str:
    """Return ``name`` if it is a path below its folder. Raises DataError; names come from untrusted index files."""
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise DataError(f"the file name '{name}' leads out of its folder", allowed="a path below the folder")
    return name
