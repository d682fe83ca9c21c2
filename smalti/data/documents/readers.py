"""Reads text, JSONL and Parquet files into record batches of one schema, in the order of files and rows.

Memory is bounded by a batch of about 4 MiB, or one record of JSONL or Parquet. Every problem is reported with file and
line. A task is plain data, so that another process can read it. ``READERS`` has a function for each kind of file.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from smalti.base.errors import DataError
from smalti.data.documents.files import Kind, SourceFile
from smalti.data.documents.parts import parts_of_stream, parts_of_text
from smalti.data.documents.rows import Row, bad_utf8, jsonl_rows, open_file, parquet_rows

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
_TASK_BYTES = 16 << 20


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
    optional_id_field: str | None = None
    """Field with the id where a record of JSONL has one and ``id_field`` is absent."""


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


def in_parts(record: Record, options: ReadOptions) -> Iterator[Record]:
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
    with open_file(file) as stream:
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
                yield Record(name, group, "", f"{file.path}:{line}: {bad_utf8(data, error)}", part=part)
            lines += data.count(b"\n")
            data = following


def _read_jsonl(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    yield from _records(file, jsonl_rows(file, options.limit_bytes), options)


def _read_parquet(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    id_fields = (name for name in (options.id_field, options.group_field) if name)
    fields = list(dict.fromkeys([options.text_field, *id_fields, *options.keep_fields]))
    hint = "set text_field, id_field or keep_fields of the source, or group_field, to one of these"
    yield from _records(file, parquet_rows(file, fields, options.limit_bytes, hint=hint), options)


def _records(file: SourceFile, rows: Iterator[Row], options: ReadOptions) -> Iterator[Record]:
    for row in rows:
        row_id = f"{file.name}:{row.number}"
        if row.problem is not None:
            yield _unreadable(row_id, f"{row.where}: {row.problem}")
        else:
            yield from in_parts(_record(row.value, row_id, row.where, options), options)


def _record(value: dict[str, Any], row_id: str, where: str, options: ReadOptions) -> Record:
    try:
        text = _field(value, options.text_field)
        if not isinstance(text, str):
            raise ValueError(f"field '{options.text_field}' holds {type(text).__name__}, not text")
        _check_unicode(text, options.text_field)
        id_field = options.id_field
        if id_field is None and isinstance(value.get(options.optional_id_field or ""), str | int):
            id_field = options.optional_id_field
        document_id = row_id if id_field is None else _name(value, id_field)
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


READERS: dict[Kind, Callable[[SourceFile, ReadOptions], Iterator[Record]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
"""The reader of each kind of file: yields its records in order, long ones in parts."""
