"""Reads a list of documents: a line ``{"source": NAME, "document": NUMBER or "ID"}`` of JSON for each."""

import json
from collections.abc import Collection

from smalti.base import store
from smalti.base.errors import DataError


def read_listed(path: str, sources: Collection[str], *, kind: str, owner: str) -> list[tuple[str, int | str, int]]:
    """Return (source, document, line number) of each entry. Raises DataError that names the line.

    ``kind`` of the entries (a takedown) and ``owner`` of the sources (this run) are words of its message.
    """
    entries: list[tuple[str, int | str, int]] = []
    for line, text in enumerate(store.read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path}, line {line} is not JSON: {error}") from error
        if not isinstance(entry, dict) or set(entry) != {"source", "document"}:
            raise DataError(
                f"{path}, line {line} is not a {kind}: {text.strip()[:100]}",
                allowed='{"source": NAME, "document": NUMBER or "ID"}, without other keys',
            )
        source, document = entry["source"], entry["document"]
        if not isinstance(source, str) or source not in sources:
            raise DataError(
                f"{path}, line {line}: {source!r} is not a source of this {owner}", allowed=", ".join(sorted(sources))
            )
        if isinstance(document, bool) or not isinstance(document, int | str):
            raise DataError(
                f"{path}, line {line}: {document!r} is not a document", allowed="a whole number, or an id in quotes"
            )
        entries.append((source, document, line))
    return entries
