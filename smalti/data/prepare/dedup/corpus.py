"""The input of a deduplication: documents, numbered by source, split and row, and the tasks that read them.

A *task* is a row group of one documents file. It is plain data and is read in a worker; page checksums are verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smalti.base.errors import DataError, UserError
from smalti.data.documents.heldout import HELDOUT, SPLITS
from smalti.data.documents.parquet import DOCUMENT_SCHEMA, unreadable
from smalti.data.prepare.curate.report import read_report
from smalti.data.prepare.dedup.buckets import PLANTED

TEXT_SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("id", pa.large_string()),
        ("source", pa.large_string()),
        ("heldout", pa.bool_()),
        ("score", pa.float64()),
        ("text", pa.large_string()),
    ]
)

TASK_SCHEMA = pa.schema(
    [
        ("path", pa.large_string()),
        ("row_group", pa.int64()),
        ("first_key", pa.int64()),
        ("source", pa.large_string()),
        ("heldout", pa.bool_()),
        ("n_bytes", pa.int64()),
        ("rows", pa.large_list(pa.int64())),
    ]
)


@dataclass(frozen=True)
class Task:
    """Documents that are read together."""

    path: str
    row_group: int
    first_key: int
    """Key of the first row of the row group; the others follow."""
    source: str
    heldout: bool
    n_bytes: int
    """Uncompressed size of the texts and ids."""
    rows: list[int] | None = None
    """Rows of the row group to read; None: all."""


@dataclass(frozen=True)
class Part:
    """One documents file: a split of a source."""

    source: str
    split: str
    path: Path
    first_key: int
    group_rows: tuple[int, ...]
    """Documents in each row group."""
    group_bytes: tuple[int, ...]

    @property
    def n_documents(self) -> int:
        """Rows of the file."""
        return sum(self.group_rows)

    def tasks(self) -> list[Task]:
        """Return one task for each row group that has rows; other writers than ours write empty ones."""
        firsts = np.cumsum([self.first_key, *self.group_rows]).tolist()
        heldout = self.split == HELDOUT
        return [
            Task(str(self.path), group, firsts[group], self.source, heldout, n_bytes)
            for group, n_bytes in enumerate(self.group_bytes)
            if self.group_rows[group]
        ]


@dataclass(frozen=True)
class Corpus:
    """All documents. A key is the number of a document."""

    folder: str
    digest: str
    """Digest of the record of the documents, and the sizes of their files."""
    parts: tuple[Part, ...]

    @property
    def n_documents(self) -> int:
        """Documents of all sources and splits."""
        return sum(part.n_documents for part in self.parts)

    @property
    def n_bytes(self) -> int:
        """Uncompressed size of all texts and ids."""
        return sum(sum(part.group_bytes) for part in self.parts)

    def tasks(self) -> list[Task]:
        """Return one task for each row group of each file, in the order of keys."""
        return [task for part in self.parts for task in part.tasks()]

    def tasks_of(self, keys: npt.NDArray[np.int64]) -> list[Task]:
        """Return tasks that read only the documents with these keys, which are sorted and distinct."""
        tasks = self.tasks()
        cuts = np.searchsorted(keys, [task.first_key for task in tasks]).tolist()
        return [
            replace(task, rows=(keys[start:stop] - task.first_key).tolist())
            for task, start, stop in zip(tasks, cuts, [*cuts[1:], len(keys)], strict=True)
            if start < stop
        ]


def read_corpus(folder: str) -> Corpus:
    """Open the output of a curation. DataError if it is none, or a file is missing or damaged."""
    record = read_report(folder)
    parts: list[Part] = []
    next_key = 0
    sizes = {}
    for source in sorted(record.get("sources", {})):
        for split in SPLITS:
            path = (Path(folder) / "documents" / source / f"{split}.parquet").resolve()
            part = _part(source, split, path, next_key)
            next_key += part.n_documents
            sizes[f"{source}/{split}"] = [path.stat().st_size, part.n_documents]
            parts.append(part)
    if not any(part.n_documents for part in parts):
        raise DataError(f"{folder} holds no documents", hint="see report.md in it for the rules that dropped them")
    return Corpus(folder, f"{record.get('digest')} {sizes}", tuple(parts))


def text_bytes(part: Part) -> int:
    """Bytes of the texts of a documents file."""
    try:
        return int(pc.sum(pq.read_table(part.path, columns=["n_bytes"]).column("n_bytes")).as_py() or 0)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(part.path, error) from error


def check_score_field(corpus: Corpus, name: str | None) -> None:
    """Raise UserError if a documents file lacks this numeric column."""
    if name is None:
        return
    for part in corpus.parts:
        schema = pq.read_schema(part.path)
        numbers = [
            field.name for field in schema if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        ]
        if part.n_documents and name not in numbers:
            raise UserError(
                f"score_field={name} is not a numeric column of {part.path}",
                allowed=", ".join(numbers) or "(the file has none)",
                hint=f"let curation keep it (keep_fields: [{name}] of each source), or leave score_field out",
            )


def read_task(task: Task, score_field: str | None) -> pa.RecordBatch:
    """Read the documents of a task, as TEXT_SCHEMA. A missing score, or NaN, is the lowest."""
    if task.first_key >= PLANTED:
        score_field = None
    columns = ["id", "text", *([score_field] if score_field else [])]
    table = read_group(task.path, task.row_group, columns)
    rows = np.arange(table.num_rows) if task.rows is None else np.asarray(task.rows, np.int64)
    if task.rows is not None:
        table = table.take(pa.array(rows))
    n = len(rows)
    score = np.full(n, -np.inf)
    if score_field is not None:
        values = np.asarray(table.column(score_field).cast(pa.float64(), safe=False).fill_null(-np.inf))
        score = np.where(np.isnan(values), -np.inf, values)
    arrays = [
        pa.array(task.first_key + rows, pa.int64()),
        _plain(table, "id"),
        pa.array([task.source] * n, pa.large_string()),
        pa.array(np.full(n, task.heldout)),
        pa.array(score),
        _plain(table, "text"),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=TEXT_SCHEMA)


def read_group(path: str | Path, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one row group of a documents file. DataError if it cannot be read."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read_row_group(row_group, columns=columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def _plain(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks().cast(pa.large_string())


def _part(source: str, split: str, path: Path, first_key: int) -> Part:
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in DOCUMENT_SCHEMA.names if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path} has no field '{missing[0]}'", allowed=", ".join(DOCUMENT_SCHEMA.names))
            groups: list[Any] = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
    rows = tuple(group.num_rows for group in groups)
    return Part(source, split, path, first_key, rows, tuple(group.total_byte_size for group in groups))
