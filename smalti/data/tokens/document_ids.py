"""Reads and writes ``ids.parquet`` beside token files: the id of every document, in the order of the tokens.

It has one column of strings, ``id``; row n is document n. A damaged page is an error. Training never opens it. Needs
pyarrow (the extra ``data``), which is imported when a file is written or read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError, missing_extra
from smalti.data.tokens.atomic_file import AtomicFile

IDS_NAME = "ids.parquet"
_GROUP_ROWS = 1 << 16


class IdWriter:
    """Writes the ids of documents to one file, which appears under its name when it is complete."""

    def __init__(self, folder: Path) -> None:
        pa, pq = _pyarrow()
        self._output = AtomicFile(folder / IDS_NAME)
        self._schema = pa.schema([pa.field("id", pa.string(), nullable=False)])
        self._array = pa.array
        self._table = pa.Table.from_arrays
        self._file = pq.ParquetWriter(
            self._output.temporary,
            self._schema,
            compression="zstd",
            use_dictionary=False,
            write_page_checksum=True,
        )
        self._ids: list[str] = []

    def add(self, document_id: str) -> None:
        """Append the id of the next document."""
        self._ids.append(document_id)
        if len(self._ids) == _GROUP_ROWS:
            self._flush()

    def finish(self) -> str:
        """Close the file and rename it to its final name; returns its SHA-256."""
        self._flush()
        self._file.close()
        return self._output.finish()

    def discard(self) -> None:
        """Remove what was written."""
        self._output.discard(self._file)

    def _flush(self) -> None:
        if self._ids:
            column = self._array(self._ids, self._schema.field("id").type)
            self._file.write_table(self._table([column], schema=self._schema))
            self._ids = []


def ids_of(folder: str | Path, documents: npt.ArrayLike) -> list[str]:
    """Return the ids of documents given by number, in the same order; reads only the row groups that contain them.

    Raises UserError if the folder has no ids, DataError for an unknown number and for a damaged file.
    """
    numbers = np.asarray(documents, dtype=np.int64)
    ids: dict[int, str] = {}
    with _opened(folder) as table:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < table.n_rows:
            raise DataError(
                f"documents {numbers.min():,} to {numbers.max():,} are not all in the table",
                allowed=f"0 to {table.n_rows - 1:,}",
            )
        group_of = np.searchsorted(table.firsts, numbers, side="right") - 1
        for group in np.unique(group_of).tolist():
            column = table.group(group)
            for number in np.unique(numbers[group_of == group]).tolist():
                ids[number] = column[number - int(table.firsts[group])].as_py()
    return [ids[number] for number in numbers.tolist()]


def documents_of(folder: str | Path, ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the documents with each of these ids, without unknown ids. Reads the whole file.

    Raises UserError if the folder has no ids, and DataError for a damaged file.
    """
    pa, _ = _pyarrow()
    import pyarrow.compute as pc

    wanted = pa.array(sorted(set(ids)), pa.string())
    documents: dict[str, list[int]] = {}
    with _opened(folder) as table:
        for group, first in enumerate(table.firsts.tolist()):
            column = table.group(group)
            for row in np.flatnonzero(pc.is_in(column, wanted).to_numpy(zero_copy_only=False)).tolist():
                documents.setdefault(column[row].as_py(), []).append(first + row)
    return documents


class _Table:
    """An open file of ids, read by row groups."""

    def __init__(self, file: Any) -> None:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        self.firsts = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
        self.n_rows = sum(sizes)
        self._file = file

    def group(self, number: int) -> Any:
        """Read the ids of a row group."""
        return self._file.read_row_group(number, columns=["id"]).column("id").combine_chunks()


class _Ranges(RawIOBase):
    """A file in a store that is read by range, so that of many millions of ids only the requested ones are read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._size = store.size_bytes(url)
        self._at = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Set the current position and return it."""
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes, in one request."""
        left = max(0, self._size - self._at)
        n = left if size is None or size < 0 else min(size, left)
        data = store.read_range(self._url, self._at, n) if n else b""
        self._at += len(data)
        return data


@contextmanager
def _opened(folder: str | Path) -> Iterator[_Table]:
    pa, pq = _pyarrow()
    path = store.join(folder, IDS_NAME)
    if not store.exists(path):
        raise UserError(
            f"{folder} has no ids of documents: there is no {IDS_NAME} beside the tokens",
            hint="give numbers of documents, or write the tokens again with 'smalti data tokenize'",
        )
    place = path if store.is_local(path) else _Ranges(path)
    try:
        with pq.ParquetFile(place, page_checksum_verification=True) as file:
            if file.schema_arrow.names != ["id"]:
                raise DataError(f"{path} has the columns {', '.join(file.schema_arrow.names)}", allowed="id")
            yield _Table(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="copy the folder again") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "data", f"{IDS_NAME}, the ids of documents,", error) from error
    return pa, pq
