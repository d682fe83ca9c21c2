"""Reads the documents of one file: each a record, or a problem with its reason. Nothing that is read raises.

Memory: a file that is one document (at most ``max_file_bytes``), a batch of Parquet, a line of JSONL, a page of WARC,
or a message; and that of the child process that parses what is not plain text.
"""

from collections.abc import Callable, Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.base.hashing import xxh3
from smalti.data.build.extract import repository
from smalti.data.build.extract.encoding import decode
from smalti.data.build.extract.formats import mail, man, notebook, pdf, warc, zipped
from smalti.data.build.extract.html import html_text
from smalti.data.build.extract.isolated import parse
from smalti.data.build.extract.record import (
    FILE_RULE,
    RECORD_RULE,
    TOO_LARGE_RULE,
    Extracted,
    ExtractOptions,
    problem,
)
from smalti.data.build.extract.unreadable import Unreadable
from smalti.data.documents.files import Kind, SourceFile, is_code
from smalti.data.documents.readers import READERS, ReadOptions, Record, in_parts
from smalti.data.documents.rows import open_file

_HTML = (".html", ".htm", ".xhtml")
_ID = "id"


def extract(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    """Yield the records of a file in order; what cannot be read is a record with a problem."""
    if options.licences is not None and (reason := repository.vendored(file.name)):
        yield problem(file.name, repository.VENDORED_RULE, reason)
        return
    try:
        yield from _READERS.get(file.kind, _whole)(file, options)
    except Unreadable as error:
        yield problem(file.name, error.rule, f"{file.path}: {error.reason}")
    except DataError as error:
        rule = TOO_LARGE_RULE if "decompresses to more than" in error.message else FILE_RULE
        yield problem(file.name, rule, error.message)
    except OSError as error:
        yield problem(file.name, FILE_RULE, f"{file.path} cannot be read: {error.strerror or error}")


def _text(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    is_html = name.endswith(_HTML)
    source, encoding = decode(_read(file, options), options.encoding, is_html=is_html)
    text = parse(html_text, source, options.html, limit_s=options.max_parse_s) if is_html else source
    kind = "html" if is_html else "code" if is_code(file.name) else "prose"
    yield from _document(file, text, kind, encoding, options, source)


def _whole(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    """Yield the text of a file that a parser finds."""
    data, limit_bytes = _read(file, options), options.max_file_bytes
    arguments: dict[Kind, tuple[Any, ...]] = {
        "pdf": (pdf.pdf_text, data, limit_bytes),
        "epub": (zipped.epub_text, data, options.html, limit_bytes),
        "docx": (zipped.docx_text, data, limit_bytes),
        "notebook": (notebook.notebook_text, data),
        "mail": (mail.message_text, data, options.html),
        "man": (man.man_text, data),
    }
    text = parse(*arguments[file.kind], limit_s=options.max_parse_s)
    yield from _document(file, text, "prose", None, options)


def _document(
    file: SourceFile, text: str, kind: str, encoding: str | None, options: ExtractOptions, source: str | None = None
) -> Iterator[Extracted]:
    """Yield the parts of a file that is one document, or why it is not wanted of a code repository.

    source: what ``text`` is the text of, with its comments.
    """
    source = text if source is None else source
    licence = None
    if options.licences is not None:
        licence = repository.licence_of(source, file.licence)
        if reason := repository.generated(file.name, source):
            yield problem(file.name, repository.GENERATED_RULE, reason)
            return
        if options.licences == "permissive" and not repository.is_permissive(licence):
            reason = f"its licence is {licence or 'not recognised'}; wanted: permissive ones"
            yield problem(file.name, repository.LICENCE_RULE, reason)
            return
    for row in _parts(file.name, text, kind, encoding, options):
        yield row._replace(licence=licence)


def _parts(name: str, text: str, kind: str, encoding: str | None, options: ExtractOptions) -> Iterator[Extracted]:
    limits = ReadOptions(max_document_bytes=options.max_document_bytes)
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, from an escape of HTML or UTF-16
    for record in in_parts(Record(name, name, text), limits):
        yield Extracted(record, kind, None if encoding == "utf-8" else encoding)


def _read(file: SourceFile, options: ExtractOptions) -> bytes:
    with open_file(file) as stream:
        data = stream.read(options.max_file_bytes + 1)
    if len(data) > options.max_file_bytes:
        what = "is larger" if file.compression == "none" else "decompresses to more"
        raise Unreadable(TOO_LARGE_RULE, f"it {what} than {options.max_file_bytes:,} bytes (max_file_bytes)")
    return data


class _Limited:
    """A stream of which at most ``limit_bytes`` are read: beyond it is a decompression bomb."""

    def __init__(self, stream: IO[bytes], limit_bytes: int | None) -> None:
        self._stream, self._limit_bytes, self._n_bytes = stream, limit_bytes, 0

    def read1(self, n_bytes: int) -> bytes:
        return self._counted(self._stream.read1(n_bytes))  # type: ignore[attr-defined]

    def readline(self, n_bytes: int) -> bytes:
        return self._counted(self._stream.readline(n_bytes))

    def _counted(self, data: bytes) -> bytes:
        self._n_bytes += len(data)
        if self._limit_bytes is not None and self._n_bytes > self._limit_bytes:
            reason = f"it decompresses to more than {self._limit_bytes:,} bytes (max_expansion)"
            raise Unreadable(TOO_LARGE_RULE, reason)
        return data


def _warc(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    seen: set[int] = set()
    with open_file(file) as stream:
        limited: Any = _Limited(stream, _expanded_limit(file, options))
        for number, response in enumerate(warc.responses(limited, options.max_file_bytes), start=1):
            key = xxh3(response.url.encode())
            name = f"{response.url} {number}" if key in seen else response.url
            seen.add(key)
            if response.problem is not None:
                yield problem(name, *response.problem)
                continue
            try:
                text, encoding = parse(
                    warc.page_text, response, options.encoding, options.html, options.max_file_bytes,
                    limit_s=options.max_parse_s,
                )  # fmt: skip
            except Unreadable as error:
                yield problem(name, error.rule, error.reason)
                continue
            yield from _parts(name, text, "html" if response.is_page else "prose", encoding, options)


def _mbox(file: SourceFile, options: ExtractOptions) -> Iterator[Extracted]:
    with open_file(file) as stream:
        limited: Any = _Limited(stream, _expanded_limit(file, options))
        for number, message in enumerate(mail.messages(limited, options.max_file_bytes), start=1):
            name = f"{file.name}:{number}"
            try:
                if message is None:
                    reason = f"it is larger than {options.max_file_bytes:,} bytes (max_file_bytes)"
                    raise Unreadable(TOO_LARGE_RULE, reason)
                text = parse(mail.message_text, message, options.html, limit_s=options.max_parse_s)
            except Unreadable as error:
                yield problem(name, error.rule, error.reason)
                continue
            yield from _parts(name, text, "prose", None, options)


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


_READERS: dict[Kind, Callable[[SourceFile, ExtractOptions], Iterator[Extracted]]] = {
    "text": _text,
    "jsonl": _rows,
    "parquet": _rows,
    "warc": _warc,
    "mbox": _mbox,
}
"""Readers of files of many documents, and of text; ``_whole`` reads the others."""
