"""Reads and writes files by path or URL: local, of object stores and HTTP (``cloud.py``), or of fsspec.

Guarantees: a local write is atomic (temporary file, fsync, rename). A missing file raises DataError with its name. A
listing that fails raises instead of being empty. Reading does not list. Object stores have no rename: a file is written
to a local temporary file and uploaded in one request, so an error leaves no file there.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from smalti.base import cloud
from smalti.base.errors import DataError


def is_local(url: str | Path) -> bool:
    """Return whether this is a plain path and not a URL with a scheme."""
    return "://" not in str(url)


def join(url: str | Path, *parts: str) -> str:
    """Join path parts under a folder given as path or URL; a URL's options (``?endpoint=...``) stay at its end."""
    folder, mark, options = str(url).partition("?") if not is_local(url) else (str(url), "", "")
    return "/".join([folder.rstrip("/"), *(part.strip("/") for part in parts)]) + mark + options


def exists(url: str | Path) -> bool:
    """Return whether a file exists; or a folder, except in object stores, which have none."""
    if is_local(url):
        return os.path.exists(url)
    if cloud.is_cloud(str(url)):
        return cloud.size_bytes(str(url)) is not None
    filesystem, path = _filesystem(url)
    return bool(filesystem.exists(path))


def size_bytes(url: str | Path) -> int:
    """Return the size of a file."""
    if cloud.is_cloud(str(url)):
        size = cloud.size_bytes(str(url))
        if size is None:
            raise _missing(url)
        return size
    filesystem, path = _existing(url)
    return int(filesystem.size(path))


def read_bytes(url: str | Path) -> bytes:
    """Return the whole file."""
    if cloud.is_cloud(str(url)):
        try:
            return cloud.read_bytes(str(url))
        except FileNotFoundError as error:
            raise _missing(url) from error
    filesystem, path = _existing_file(url)
    return bytes(filesystem.cat_file(path))


def read_range(url: str | Path, start: int, length: int) -> bytes:
    """Return ``length`` bytes from ``start`` (fewer only at the end of the file); both at least 0."""
    assert start >= 0, start
    assert length >= 0, length
    try:  # asking first whether it exists would be a second request
        if cloud.is_cloud(str(url)):
            return cloud.read_range(str(url), start, length)
        filesystem, path = _filesystem(url)
        return bytes(filesystem.cat_file(path, start=start, end=start + length))
    except FileNotFoundError as error:
        raise _missing(url) from error


def read_text(url: str | Path) -> str:
    """Return the whole file as UTF-8 text."""
    try:
        return read_bytes(url).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{url} is not UTF-8 text: {error}") from error


def read_json(url: str | Path) -> Any:
    """Return the value of a JSON file. Raises DataError where it cannot be parsed."""
    try:
        return json.loads(read_text(url))
    except ValueError as error:
        raise DataError(f"{url} is not valid JSON: {error}") from error


def list_folder(url: str | Path) -> list[str]:
    """Return the sorted base names in a folder. Raises DataError where it does not exist or is a file."""
    if cloud.is_cloud(str(url)):
        names_in_store = cloud.names(str(url))
        if not names_in_store:
            raise DataError(f"{url} is a file, not a folder") if exists(url) else _missing(url)
        return names_in_store
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
    """Open a binary file that gets its final name only when the block ends without an error."""
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
    """Open a local temporary file that is uploaded to ``url`` when the block ends without an error.

    fsspec's own file objects commit what they hold when they are closed, also on the way out of an exception.
    """
    filesystem, path = (None, url) if cloud.is_cloud(url) else _filesystem(url)
    if url.startswith(("file://", "local://")):
        with open_write(path) as file:
            yield file
        return
    with tempfile.TemporaryDirectory(prefix="smalti-") as folder:
        temporary = os.path.join(folder, "object")
        with open(temporary, "wb") as file:
            yield file
        if filesystem is None:
            cloud.put(url, temporary)
        else:
            filesystem.put_file(temporary, path)


def _missing(url: str | Path) -> DataError:
    return DataError(f"{url} does not exist")


def _filesystem(url: str | Path) -> tuple[Any, str]:
    """Return fsspec's file system and the path in it. Imported here, as the import is slow."""
    import fsspec

    filesystem: tuple[Any, str] = fsspec.core.url_to_fs(str(url))
    return filesystem


def _existing(url: str | Path) -> tuple[Any, str]:
    filesystem, path = _filesystem(url)
    if not filesystem.exists(path):
        raise _missing(url)
    return filesystem, path


def _existing_file(url: str | Path) -> tuple[Any, str]:
    filesystem, path = _existing(url)
    if filesystem.isdir(path):
        raise DataError(f"{url} is a folder, not a file")
    return filesystem, path
