"""Reads the rows of a task's JSONL file."""

import json
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError


def read_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, row) of a JSONL file. Lines end at ``\\n`` alone: texts may hold other line separators."""
    if not store.exists(path):
        raise DataError(f"there is no file {path}", hint="give the path of a JSONL file, one JSON object a line")
    data = store.read_bytes(str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{number}: not UTF-8 text: {error}", allowed="UTF-8") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}:{number}: the text is not Unicode: {error.reason}", allowed="no surrogates"
            ) from error
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}", allowed="one JSON object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: {line[:60]}", allowed='a JSON object: {"column": value, ...}')
        rows.append((number, row))
    if not rows:
        raise DataError(f"{path} has no rows", allowed="one JSON object a line")
    return rows
