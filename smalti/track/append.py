"""Files of one JSON object a line, safe against a process that dies while it writes.

Promises: a line is one ``write`` to a file opened for appending, so two processes never mix theirs; a torn last line
is cut off or skipped, never taken for data. Local files only.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smalti.base import store


class LineFile:
    """A JSON-lines file open for appending."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if not _ends_with_line(self._file):
            os.write(self._file, b"\n")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null: JSON has no word for them."""
        line = json.dumps({key: _finite(value) for key, value in values.items()}, ensure_ascii=False, allow_nan=False)
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; further writes fail."""
        os.close(self._file)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; lines torn by a dying process are skipped, a missing file is empty."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            value = _parse(text)
            if value is not None:
                yield value


def rewrite(path: str | Path, keep: Any) -> int:
    """Keep the lines for which ``keep(object)`` is true, torn ones go; returns how many were dropped."""
    if not os.path.exists(path):
        return 0
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept = [text for text in lines if text.endswith("\n") and (value := _parse(text)) is not None and keep(value)]
    if len(kept) != len(lines):
        store.write_text(path, "".join(kept))
    return len(lines) - len(kept)


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return value


def _ends_with_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
