"""What extraction yields, what decides it, and why a file or a part of it cannot be read."""

from dataclasses import dataclass
from typing import NamedTuple

from smalti.data.documents.readers import Record

FILE_RULE = "extract/file"
RECORD_RULE = "extract/record"
TOO_LARGE_RULE = "extract/too-large"
TIME_RULE = "extract/time"


class Extracted(NamedTuple):
    """A record of a file."""

    record: Record
    kind: str
    """``prose``, ``code`` or ``html``; for a problem its rule."""
    encoding: str | None = None
    """Of a file of text that is not UTF-8."""
    licence: str | None = None
    """Of a file of an input with ``code``."""


@dataclass(frozen=True)
class ExtractOptions:
    """What decides the text of a file, besides its bytes. Plain data."""

    text_field: str
    id_field: str | None
    encoding: str
    html: str
    """The method of ``html.html_method``."""
    max_document_bytes: int
    max_file_bytes: int
    max_expansion: int
    max_parse_s: float
    licences: str | None = None
    """Those of ``code`` of the input."""


def problem(name: str, rule: str, reason: str) -> Extracted:
    """Return the record of something that cannot be read."""
    return Extracted(Record(name, name, "", reason), rule)
