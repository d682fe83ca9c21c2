"""The Parquet files of documents and of drops: schemas, writer, reader. Equal rows give equal bytes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import DataError

DOCUMENT_SCHEMA = pa.schema(
    [("id", pa.string()), ("text", pa.large_string()), ("group", pa.string()), ("n_bytes", pa.int64())]
)
"""A clean document; ``n_bytes`` is the length of ``text`` in UTF-8."""


def documents_schema(keep_fields: Sequence[str]) -> pa.Schema:
    """Return the schema of the documents of a source with ``keep_fields``."""
    return pa.schema([*DOCUMENT_SCHEMA, *((name, pa.float64()) for name in keep_fields)])


DROP_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("rule", pa.string()),
        ("reason", pa.string()),
        ("score", pa.float64()),
    ]
)
"""A dropped document, the rule that dropped it, and why; ``score`` is null where the rule measures nothing."""

_GROUP_ROWS = 20_000
_GROUP_BYTES = 16 << 20


def open_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet file for writing, with zstd and page checksums; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


class RowWriter:
    """Writes rows to one Parquet file. Row groups depend on the rows only, not on the batches they arrive in."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = open_writer(path, schema)
        self._rows: list[dict[str, Any]] = []
        self._n_bytes = 0

    def add(self, row: dict[str, Any], n_bytes: int = 0) -> None:
        """Append a row; ``n_bytes`` is its approximate size."""
        self._rows.append(row)
        self._n_bytes += n_bytes
        if len(self._rows) >= _GROUP_ROWS or self._n_bytes >= _GROUP_BYTES:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []
        self._n_bytes = 0


def rows_per_batch(file: pq.ParquetFile, n_bytes: int, limit: int) -> int:
    """Number of rows, from 1 to ``limit``, that take about ``n_bytes`` in the row group with the longest rows."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    longest = max((group.total_byte_size / group.num_rows for group in groups if group.num_rows), default=0.0)
    return max(1, min(limit, int(n_bytes / longest))) if longest else limit


def read_documents(path: Path | str, *, batch_rows: int = 512) -> Iterator[dict[str, Any]]:
    """Yield the rows of a documents file in order, without further columns; page checksums are verified.

    Raises DataError if the file is missing or damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not set(DOCUMENT_SCHEMA.names) <= set(file.schema_arrow.names):
                raise DataError(
                    f"{path} has the fields {', '.join(file.schema_arrow.names)}",
                    allowed=", ".join(DOCUMENT_SCHEMA.names),
                )
            n_rows = rows_per_batch(file, _GROUP_BYTES, batch_rows)
            for batch in file.iter_batches(batch_size=n_rows, columns=DOCUMENT_SCHEMA.names):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> DataError:
    """Return the error for a documents file that cannot be read."""
    return DataError(f"{path} cannot be read: {error}", hint="run 'smalti data curate' again, or copy the folder again")
