"""Reads the documents of one file: each a record, or a problem with its reason. Nothing that is read raises.

Memory: a text or HTML file (at most ``max_file_bytes``), a batch of Parquet, or a line of JSONL.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import html_text
from smalti.data.documents.files import SourceFile, is_code
from smalti.data.documents.readers import READERS, ReadOptions, Record, in_parts
from smalti.data.documents.rows import open_file

FILE_RULE = "extract/file"
RECORD_RULE = "extract/record"
ENCODING_RULE = "extract/encoding"
TOO_LARGE_RULE = "extract/too-large"

_HTML = (".html", ".htm", ".xhtml")
_ID = "id"


class Extracted(NamedTuple):
    """A record of a file."""

    record: Record
    kind: str
    """``prose``, ``code`` or ``html``; for a problem its rule."""
    encoding: str | None = None
    """Of a file of text that is not UTF-8."""


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


class _TooLarge(Exception):
    """The file decompresses to more than is allowed."""


def extract(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    """Yield the records of a file in order; what cannot be read is a record with a problem."""
    try:
        if file.kind == "text":
            yield from _text(file, options)
        else:
            yield from _rows(file, options)
    except UnknownEncoding as error:
        yield _problem(file, ENCODING_RULE, str(error))
    except _TooLarge as error:
        yield _problem(file, TOO_LARGE_RULE, str(error))
    except DataError as error:
        rule = TOO_LARGE_RULE if "decompresses to more than" in error.message else FILE_RULE
        yield _problem(file, rule, error.message)
    except OSError as error:
        yield _problem(file, FILE_RULE, f"{file.path} cannot be read: {error.strerror or error}")


def _problem(file: SourceFile, rule: str, reason: str) -> Extracted:
    return Extracted(Record(file.name, file.name, "", reason), rule)


def _text(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    is_html = name.endswith(_HTML)
    text, encoding = decode(_read(file, options), options.encoding, is_html=is_html)
    if is_html:
        text = html_text(text, options.html)
    kind = "html" if is_html else "code" if is_code(file.name) else "prose"
    limits = ReadOptions(max_document_bytes=options.max_document_bytes)
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, from an escape of HTML or UTF-16
    for record in in_parts(Record(file.name, file.name, text), limits):
        yield Extracted(record, kind, None if encoding == "utf-8" else encoding)


def _read(file: SourceFile, options: ExtractOptions) -> bytes:
    with open_file(file) as stream:
        data = stream.read(options.max_file_bytes + 1)
    if len(data) > options.max_file_bytes:
        what = "is larger" if file.compression == "none" else "decompresses to more"
        raise _TooLarge(f"{file.path} {what} than {options.max_file_bytes:,} bytes (max_file_bytes)")
    return data


def _rows(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    read = ReadOptions(
        options.text_field,
        _parquet_id(file, options) if file.kind == "parquet" else options.id_field,
        unreadable="drop",
        limit_bytes=_expanded_limit(file, options),
        max_document_bytes=options.max_document_bytes,
        optional_id_field=_ID,
    )
    for record in READERS[file.kind](file, read):
        yield Extracted(record, "prose" if record.problem is None else RECORD_RULE)


def _expanded_limit(file: SourceFile, options: ExtractOptions) -> int | None:
    if file.compression == "none" and file.kind != "parquet":
        return None
    return max(options.max_file_bytes, options.max_expansion * file.n_bytes)


def _parquet_id(file: SourceFile, options: ExtractOptions) -> str | None:
    """Return ``id_field``, or ``id`` if the file has such a column of text or whole numbers."""
    if options.id_field is not None:
        return options.id_field
    try:
        schema = pq.read_schema(file.path)
    except (pa.ArrowException, OSError):
        return None  # the reader says what is wrong
    index = schema.get_field_index(_ID)
    if index < 0:
        return None
    type_ = schema.field(index).type
    is_name = pa.types.is_integer(type_) or pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return _ID if is_name else None
