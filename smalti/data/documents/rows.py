"""Reads the rows of JSONL and Parquet files one by one, each with its place or with the reason why it is unreadable."""

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.data.documents.files import SourceFile
from smalti.data.documents.parquet import rows_per_batch

_CHUNK_BYTES = 1 << 20

_MAX_LINE_BYTES = 256 << 20
"""A longer line of JSONL is an error: it would be held in memory several times."""

_READ_BYTES = 8 << 20
"""Bytes of Parquet that are read at once."""


class Row(NamedTuple):
    """A row of a file."""

    number: int
    """Of its line or row, from 1."""
    where: str
    """File and line, for messages."""
    value: dict[str, Any]
    """Empty if there is a problem."""
    problem: str | None = None


def jsonl_rows(file: SourceFile, limit_bytes: int | None = None) -> Iterator[Row]:
    """Yield the objects of the lines that are not empty. DataError if the file decompresses to more than the limit."""
    with open_file(file) as stream:
        for number, line in enumerate(_lines(stream, file, limit_bytes), start=1):
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Row(number, where, {}, bad_utf8(line, error))
                continue
            except (ValueError, RecursionError) as error:
                yield Row(number, where, {}, f"this line is not valid JSON: {error}")
                continue
            if isinstance(value, dict):
                yield Row(number, where, value)
            else:
                yield Row(number, where, {}, f"this line holds {type(value).__name__}, not an object")


def parquet_rows(
    file: SourceFile, fields: Sequence[str] | None = None, limit_bytes: int | None = None, *, hint: str | None = None
) -> Iterator[Row]:
    """Yield the rows, with these columns; absent: all.

    Raises DataError, with ``hint``, if a column is missing; also if the file decompresses to more than the limit.
    """
    try:
        table = pq.ParquetFile(file.path if file.data is None else pa.BufferReader(file.data))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file.path} is not a Parquet file: {error}") from error
    with table:
        names = table.schema_arrow.names
        fields = names if fields is None else fields
        missing = [name for name in fields if name not in names]
        if missing:
            raise DataError(f"{file.path} has no field '{missing[0]}'", allowed=", ".join(names), hint=hint)
        repeated = [name for name in fields if names.count(name) > 1]
        if repeated:
            raise DataError(f"{file.path} has more than one field '{repeated[0]}'", hint="give each its own name")
        if limit_bytes is not None and _decompressed_bytes(table, fields) > limit_bytes:
            raise _too_large(file, limit_bytes)
        for number, value in enumerate(_values(table, file, fields), start=1):
            where = f"{file.path}, row {number}"
            if isinstance(value, Exception):
                yield Row(number, where, {}, str(value))
            else:
                yield Row(number, where, value)


def _lines(stream: IO[bytes], file: SourceFile, limit_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines; at most one byte more than ``limit_bytes`` is read."""
    left = sys.maxsize if limit_bytes is None else limit_bytes
    while line := stream.readline(min(left, _MAX_LINE_BYTES) + 1):
        left -= len(line)
        if left < 0:
            assert limit_bytes is not None
            raise _too_large(file, limit_bytes)
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(f"{file.path} has a line of more than {_MAX_LINE_BYTES:,} bytes", hint="write shorter ones")
        yield line


def _too_large(file: SourceFile, limit_bytes: int) -> DataError:
    return DataError(f"{file.path} decompresses to more than {limit_bytes:,} bytes", allowed=f"{limit_bytes:,} bytes")


def _values(table: Any, file: SourceFile, fields: Sequence[str]) -> Iterator[dict[str, Any] | Exception]:
    """Yield the rows, or the error of a row with an invalid value (text that is not UTF-8, a date out of range)."""
    try:
        for batch in table.iter_batches(batch_size=rows_per_batch(table, _READ_BYTES, 1024), columns=list(fields)):
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


def bad_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """Return what is wrong with bytes that are not UTF-8."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "this is UTF-16, not UTF-8"
    return f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"


@contextmanager
def open_file(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. DataError for a damaged one."""
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
