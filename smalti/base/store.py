"""Storage through one port (fsspec): a path is local or a URL (``s3://...``).

Promises: a local write appears whole or not at all (temporary file, fsync, rename); a missing file is a DataError that
names it; a listing that failed raises instead of being empty. Does not promise rename on object stores: a single PUT
is atomic there.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec

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
    filesystem, path = _existing(url)
    return bytes(filesystem.cat_file(path))


def read_range(url: str | Path, start: int, length: int) -> bytes:
    """``length`` bytes from ``start`` (fewer only at the end of the file)."""
    filesystem, path = _existing(url)
    return bytes(filesystem.cat_file(path, start=start, end=start + length))


def read_text(url: str | Path) -> str:
    """The whole file as UTF-8."""
    return read_bytes(url).decode("utf-8")


def read_json(url: str | Path) -> Any:
    """A JSON file; a file that does not parse is a DataError."""
    try:
        return json.loads(read_text(url))
    except ValueError as error:
        raise DataError(f"{url} is not valid JSON: {error}") from error


def list_folder(url: str | Path) -> list[str]:
    """Sorted base names in a folder; a folder that does not exist is an error, not an empty list."""
    filesystem, path = _existing(url)
    return sorted(os.path.basename(name.rstrip("/")) for name in filesystem.ls(path, detail=False))


def make_folder(url: str | Path) -> str:
    """Create a folder and its parents (a no-op on object stores); returns it."""
    if is_local(url):
        os.makedirs(url, exist_ok=True)
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
        with fsspec.open(str(url), "wb") as file:
            yield file
        return
    final = Path(url)
    final.parent.mkdir(parents=True, exist_ok=True)
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


def _existing(url: str | Path) -> tuple[Any, str]:
    filesystem, path = fsspec.core.url_to_fs(str(url))
    if not filesystem.exists(path):
        raise DataError(f"{url} does not exist")
    return filesystem, path
