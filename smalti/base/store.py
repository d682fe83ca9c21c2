"""Storage through one port (fsspec): a path is local or a URL (``s3://...``).

Promises: a local write appears whole or not at all (temporary file, fsync, rename); a missing file is a DataError that
names it; a listing that failed raises instead of being empty. Does not promise rename on object stores: a file is
written to a local temporary first and then put in one piece, so that an error on the way leaves nothing there.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from smalti.base.errors import DataError


def is_local(url: str | Path) -> bool:
    """True for a plain path, False for a URL with a scheme."""
    return "://" not in str(url)


def join(url: str | Path, *parts: str) -> str:
    """Join path parts under a folder given as path or URL."""
    return "/".join([str(url).rstrip("/"), *(part.strip("/") for part in parts)])


def exists(url: str | Path) -> bool:
    """True if a file or folder is there."""
    if is_local(url):
        return os.path.exists(url)
    filesystem, path = fsspec.core.url_to_fs(str(url))
    return bool(filesystem.exists(path))


def size_bytes(url: str | Path) -> int:
    """Size of a file."""
    filesystem, path = _existing(url)
    return int(filesystem.size(path))


def read_bytes(url: str | Path) -> bytes:
    """The whole file."""
    filesystem, path = _existing_file(url)
    return bytes(filesystem.cat_file(path))


def read_range(url: str | Path, start: int, length: int) -> bytes:
    """``length`` bytes from ``start`` (fewer only at the end of the file); both at least 0."""
    assert start >= 0, start
    assert length >= 0, length
    filesystem, path = fsspec.core.url_to_fs(str(url))
    try:  # asking first whether it exists would be a second request for every block of a token file
        return bytes(filesystem.cat_file(path, start=start, end=start + length))
    except FileNotFoundError as error:
        raise DataError(f"{url} does not exist") from error


def read_text(url: str | Path) -> str:
    """The whole file as UTF-8."""
    try:
        return read_bytes(url).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{url} is not UTF-8 text: {error}") from error


def read_json(url: str | Path) -> Any:
    """A JSON file; a file that does not parse is a DataError."""
    try:
        return json.loads(read_text(url))
    except ValueError as error:
        raise DataError(f"{url} is not valid JSON: {error}") from error


def list_folder(url: str | Path) -> list[str]:
    """Sorted base names in a folder; one that does not exist, or a file, is a DataError and not an empty list."""
    filesystem, path = _existing(url)
    if not filesystem.isdir(path):
        raise DataError(f"{url} is a file, not a folder")
    # Object stores may list the marker of the folder itself.
    names = (name.rstrip("/") for name in filesystem.ls(path, detail=False))
    return sorted(os.path.basename(name) for name in names if name != path.rstrip("/"))


def make_folder(url: str | Path) -> str:
    """Create a folder and its parents (a no-op on object stores); returns it."""
    if is_local(url):
        try:
            os.makedirs(url, exist_ok=True)
        except FileNotFoundError as error:  # parents are made too, so the place itself takes none (/proc)
            raise DataError(f"no folder can be made at {url}", hint="name another folder") from error
    return str(url)


def write_bytes(url: str | Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with open_write(url) as file:
        file.write(data)


def write_text(url: str | Path, text: str) -> None:
    """Write UTF-8 text whole or not at all."""
    write_bytes(url, text.encode("utf-8"))


def write_json(url: str | Path, value: Any) -> None:
    """Write indented JSON whole or not at all."""
    write_text(url, json.dumps(value, indent=2) + "\n")


@contextmanager
def open_write(url: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its final name only when the block ends without an error."""
    if not is_local(url):
        with _put_at_the_end(str(url)) as file:
            yield file
        return
    final = Path(url)
    make_folder(final.parent)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _put_at_the_end(url: str) -> Iterator[IO[bytes]]:
    """A local temporary file that is put under ``url`` when the block ends without an error.

    fsspec's own file objects commit what they hold when they are closed, also on the way out of an exception.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    if isinstance(filesystem, LocalFileSystem):
        with open_write(path) as file:
            yield file
        return
    with tempfile.TemporaryDirectory(prefix="smalti-") as folder:
        temporary = os.path.join(folder, "object")
        with open(temporary, "wb") as file:
            yield file
        filesystem.put_file(temporary, path)


def _existing(url: str | Path) -> tuple[Any, str]:
    filesystem, path = fsspec.core.url_to_fs(str(url))
    if not filesystem.exists(path):
        raise DataError(f"{url} does not exist")
    return filesystem, path


def _existing_file(url: str | Path) -> tuple[Any, str]:
    filesystem, path = _existing(url)
    if filesystem.isdir(path):
        raise DataError(f"{url} is a folder, not a file")
    return filesystem, path
