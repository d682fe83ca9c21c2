"""Reads JSON files of a model's folder, which may be hostile. Without torch.

Guarantees: a file that is not regular, is too large, or does not contain one object with unique keys and finite numbers
raises a DataError that names it.
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
    """Return the object in a file."""
    with opened(path) as file:
        size_bytes = os.fstat(file).st_size
        if size_bytes > most_bytes:
            raise DataError(f"{path} has {size_bytes:,} bytes", allowed=f"up to {most_bytes:,}")
        return parsed(path, os.pread(file, size_bytes, 0))


def parsed(path: Path, data: bytes, what: str = "") -> dict[str, Any]:
    """Return the object in ``data``; ``path`` and ``what`` (a part of that file) are named in errors."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_finite_only)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}{what} does not hold a JSON object: {json.dumps(value)[:60]}", allowed="{...}")
    return value


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Context manager: a descriptor of a regular file, because a pipe or a device would hang or never end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path} is not a regular file")
        yield file
    finally:
        os.close(file)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key '{key}' occurs twice")
        values[key] = value
    return values


def _finite_only(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
