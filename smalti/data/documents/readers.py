"""Reads text, JSONL and Parquet files into record batches of one schema, in the order of files and rows.

Memory is bounded by a batch of about 4 MiB, or one record of JSONL or Parquet. Every problem is reported with file and
line. A task is plain data, so that another process can read it. ``READERS`` has a function for each kind of file.
"""

import codecs
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.data.documents.files import Kind, SourceFile
from smalti.data.documents.parquet import rows_per_batch
from smalti.data.documents.parts import parts_of_stream, parts_of_text

RAW_SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("group", pa.large_string()),
        ("text", pa.large_string()),
        ("problem", pa.large_string()),
        ("numbers", pa.large_string()),
        ("part", pa.large_string()),
    ]
)
"""``problem``: why the record could not be read (``text`` is then empty), or null. ``numbers``: the ``keep_fields`` as
a JSON list, or null. ``part``: number of the part, from 1, of a document that was cut, or null."""

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096
_CHUNK_BYTES = 1 << 20
_TASK_BYTES = 16 << 20

_READ_BYTES = 8 << 20
"""Bytes of Parquet that are read at once."""


class Record(NamedTuple):
    """A row of RAW_SCHEMA."""

    id: str
    group: str
    text: str
    problem: str | None = None
    numbers: str | None = None
    part: str | None = None


@dataclass(frozen=True)
class ReadOptions:
    """The fields to read, the limits, and what to do with a record that cannot be read."""

    text_field: str = "text"
    id_field: str | None = None
    group_field: str | None = None
    keep_fields: tuple[str, ...] = ()
    unreadable: Literal["stop", "drop"] = "stop"
    limit_bytes: int | None = None
    """Limit on the decompressed size of a file; a larger one is an error."""
    max_document_bytes: int | None = None
    """Longer documents are cut into parts (see ``parts``)."""


@dataclass(frozen=True)
class ReadTask:
    """Files of one source that are read one after another."""

    files: tuple[SourceFile, ...]
    options: ReadOptions

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield record batches of RAW_SCHEMA.

        Raises DataError with file and line for an unreadable record, unless ``unreadable`` is "drop".
        """
        rows: list[Record] = []
        size = 0
        for file in self.files:
            for record in READERS[file.kind](file, self.options):
                if record.problem is not None and self.options.unreadable == "stop":
                    hint = "fix the record, or set unreadable=drop to drop and list unreadable records"
                    raise DataError(record.problem, hint=hint)
                rows.append(record)
                size += len(record.text)
                if size >= _BATCH_BYTES or len(rows) >= _BATCH_ROWS:
                    yield _batch(rows)
                    rows = []
                    size = 0
        if rows:
            yield _batch(rows)


def read_tasks(files: Sequence[SourceFile], options: ReadOptions) -> list[ReadTask]:
    """Group files, in order, into tasks of about 16 MiB; a larger file is a task of its own."""
    tasks: list[ReadTask] = []
    group: list[SourceFile] = []
    size = 0
    for file in files:
        if group and size + file.n_bytes > _TASK_BYTES:
            tasks.append(ReadTask(tuple(group), options))
            group = []
            size = 0
        group.append(file)
        size += file.n_bytes
    return [*tasks, ReadTask(tuple(group), options)] if group else tasks


def _batch(rows: list[Record]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(column, pa.large_string()) for column in columns], schema=RAW_SCHEMA)


def _unreadable(row_id: str, problem: str) -> Record:
    return Record(row_id, row_id, "", problem)


def _in_parts(record: Record, options: ReadOptions) -> Iterator[Record]:
    """Yield the record, or one for each part of a long text; without ``group_field`` each part is its own group."""
    if options.max_document_bytes is None:
        yield record
        return
    parts = parts_of_text(record.text, options.max_document_bytes)
    first = next(parts)
    if len(first) == len(record.text):
        yield record
        return
    for number, text in enumerate(itertools.chain([first], parts), start=1):
        name = part_id(record.id, number)
        group = name if options.group_field is None else record.group
        yield record._replace(id=name, group=group, text=text, part=str(number))


def part_id(document_id: str, number: int) -> str:
    """Id of a part of a document."""
    return f"{document_id}#{number}"


def _read_text(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    if options.keep_fields:
        problem = f"{file.path}: a file of text has no field '{options.keep_fields[0]}' (keep_fields)"
        yield _unreadable(file.name, problem)
        return
    with _open(file) as stream:
        lines = 0
        limit_bytes = options.max_document_bytes
        parts = iter([stream.read()]) if limit_bytes is None else parts_of_stream(stream, limit_bytes)
        data: bytes | None = next(parts)
        number = 0
        while data is not None:
            following = next(parts, None)
            number += 1
            is_part = number > 1 or following is not None
            name = part_id(file.name, number) if is_part else file.name
            group = name if options.group_field is None else file.name
            part = str(number) if is_part else None
            try:
                yield Record(name, group, data.decode("utf-8"), part=part)
            except UnicodeDecodeError as error:
                line = lines + data.count(b"\n", 0, error.start) + 1
                yield Record(name, group, "", f"{file.path}:{line}: {_bad_utf8(data, error)}", part=part)
            lines += data.count(b"\n")
            data = following


def _read_jsonl(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    with _open(file) as stream:
        for number, line in enumerate(_lines(stream, file, options.limit_bytes), start=1):
            if not line.strip():
                continue
            row_id = f"{file.name}:{number}"
            try:
                value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
            except UnicodeDecodeError as error:
                yield _unreadable(row_id, f"{file.path}:{number}: {_bad_utf8(line, error)}")
                continue
            except (ValueError, RecursionError) as error:
                yield _unreadable(row_id, f"{file.path}:{number}: this line is not valid JSON: {error}")
                continue
            if not isinstance(value, dict):
                problem = f"this line holds {type(value).__name__}, not an object"
                yield _unreadable(row_id, f"{file.path}:{number}: {problem}")
                continue
            yield from _in_parts(_record(value, row_id, f"{file.path}:{number}", options), options)


def _lines(stream: IO[bytes], file: SourceFile, limit_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines; at most one byte more than ``limit_bytes`` is read."""
    if limit_bytes is None:
        yield from stream
        return
    left = limit_bytes
    while line := stream.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise _too_large(file, limit_bytes)
        yield line


def _too_large(file: SourceFile, limit_bytes: int) -> DataError:
    return DataError(f"{file.path} decompresses to more than {limit_bytes:,} bytes", allowed=f"{limit_bytes:,} bytes")


def _read_parquet(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    id_fields = (name for name in (options.id_field, options.group_field) if name)
    fields = [options.text_field, *id_fields, *options.keep_fields]
    try:
        table = pq.ParquetFile(file.path if file.data is None else pa.BufferReader(file.data))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file.path} is not a Parquet file: {error}") from error
    with table:
        missing = [name for name in fields if name not in table.schema_arrow.names]
        if missing:
            raise DataError(
                f"{file.path} has no field '{missing[0]}'",
                allowed=", ".join(table.schema_arrow.names),
                hint="set text_field, id_field or keep_fields of the source, or group_field, to one of these",
            )
        repeated = [name for name in fields if table.schema_arrow.names.count(name) > 1]
        if repeated:
            raise DataError(f"{file.path} has more than one field '{repeated[0]}'", hint="give each its own name")
        if options.limit_bytes is not None and _decompressed_bytes(table, fields) > options.limit_bytes:
            raise _too_large(file, options.limit_bytes)
        for number, value in enumerate(_rows(table, file, list(dict.fromkeys(fields))), start=1):
            row_id = f"{file.name}:{number}"
            where = f"{file.path}, row {number}"
            if isinstance(value, Exception):
                yield _unreadable(row_id, f"{where}: {value}")
            else:
                yield from _in_parts(_record(value, row_id, where, options), options)


def _rows(table: Any, file: SourceFile, fields: list[str]) -> Iterator[dict[str, Any] | Exception]:
    """Yield the rows, or the error of a row with an invalid value (text that is not UTF-8, a date out of range)."""
    try:
        for batch in table.iter_batches(batch_size=rows_per_batch(table, _READ_BYTES, 1024), columns=fields):
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError):
                rows = [_row(batch, number) for number in range(batch.num_rows)]
            yield from rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file.path} cannot be read to its end: {' '.join(str(error).split())}",
            hint="the file is damaged: copy it again",
        ) from error


def _row(batch: pa.RecordBatch, number: int) -> dict[str, Any] | Exception:
    try:
        return dict(batch.slice(number, 1).to_pylist()[0])
    except (ValueError, OverflowError) as error:
        return error


def _decompressed_bytes(table: Any, fields: Sequence[str]) -> int:
    """Return the decompressed size of these columns, from the metadata of the file."""
    groups = (table.metadata.row_group(number) for number in range(table.metadata.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in fields)


def _record(value: dict[str, Any], row_id: str, where: str, options: ReadOptions) -> Record:
    try:
        text = _field(value, options.text_field)
        if not isinstance(text, str):
            raise ValueError(f"field '{options.text_field}' holds {type(text).__name__}, not text")
        _check_unicode(text, options.text_field)
        document_id = row_id if options.id_field is None else _name(value, options.id_field)
        group = document_id if options.group_field is None else _name(value, options.group_field)
        numbers = json.dumps([_number(value, name) for name in options.keep_fields]) if options.keep_fields else None
    except ValueError as error:
        return _unreadable(row_id, f"{where}: {error}")
    return Record(document_id, group, text, numbers=numbers)


def _field(value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise ValueError(f"there is no field '{name}'; fields: {', '.join(map(str, value)) or 'none'}")
    return value[name]


def _name(value: dict[str, Any], name: str) -> str:
    field = _field(value, name)
    if isinstance(field, bool) or not isinstance(field, str | int):
        raise ValueError(f"field '{name}' holds {type(field).__name__}, not text or a whole number")
    text = str(field)
    _check_unicode(text, name)
    return text


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field '{name}' holds half a surrogate pair: {error}") from error


def _number(value: dict[str, Any], name: str) -> float | None:
    field = _field(value, name)
    if field is None:
        return None
    if isinstance(field, bool) or not isinstance(field, int | float):
        raise ValueError(f"field '{name}' holds {type(field).__name__}, not a number")
    try:
        return float(field)
    except OverflowError as error:
        raise ValueError(f"field '{name}' holds a number that is too large") from error


def _bad_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "this is UTF-16, not UTF-8"
    return f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"


@contextmanager
def _open(file: SourceFile) -> Iterator[IO[bytes]]:
    try:
        with _stream(file) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file.path} is not a complete gzip file: {error}") from error
    except OSError as error:
        # Arrow's errors are OSErrors without a number.
        if file.compression == "zst" and error.errno is None:
            raise DataError(f"{file.path} is not a complete zstd file: {error}") from error
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from error


def _stream(file: SourceFile) -> IO[bytes]:
    if file.compression == "gz":
        return cast(IO[bytes], gzip.open(file.path if file.data is None else io.BytesIO(file.data), "rb"))
    if file.compression == "zst":
        # By Arrow: the streams of the package zstandard end without an error if a file is truncated.
        packed = file.path if file.data is None else pa.BufferReader(file.data)
        return io.BufferedReader(pa.input_stream(packed, compression="zstd"), _CHUNK_BYTES)
    return open(file.path, "rb") if file.data is None else io.BytesIO(file.data)


READERS: dict[Kind, Callable[[SourceFile, ReadOptions], Iterator[Record]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
"""The reader of each kind of file: yields its records in order, long ones in parts."""
