"""JSON files of a model's folder, read as what may be hostile. Without torch.

Guarantees: a file is a plain one, of bounded size, and holds one object in which no key is twice and every number is
finite; anything else is a DataError that names the file.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError

LARGEST_JSON_BYTES = 100_000_000


def read_object(path: Path, *, most_bytes: int = LARGEST_JSON_BYTES) -> dict[str, Any]:
    """The object that a file holds."""
    with opened(path) as file:
        size_bytes = os.fstat(file).st_size
        if size_bytes > most_bytes:
            raise DataError(f"{path} has {size_bytes:,} bytes", allowed=f"up to {most_bytes:,}")
        return parsed(path, os.pread(file, size_bytes, 0))


def parsed(path: Path, data: bytes, what: str = "") -> dict[str, Any]:
    """The object in ``data``; ``path`` and ``what`` (a part of that file) are for the error."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_finite_only)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}{what} does not hold a JSON object: {json.dumps(value)[:60]}", allowed="{...}")
    return value


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a plain file; a pipe or a device would hang or never end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path} is not a plain file")
        yield file
    finally:
        os.close(file)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key '{key}' is there twice")
        found[key] = value
    return found


def _finite_only(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
