"""Writes the kept documents and the drops: in workers, a task for each source, a row group at a time.

Rows keep their order and all their columns; equal decisions give equal bytes.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.data.documents.parquet import DROP_SCHEMA, open_writer, unreadable
from smalti.data.prepare.dedup.corpus import Corpus

OUTPUT_DROP_SCHEMA = pa.schema([*DROP_SCHEMA, ("partner", pa.string())])
"""The drops of a curation, with the document that is kept instead (``source/id``)."""


def source_tasks(corpus: Corpus, decisions: Path, work: Path) -> pa.Table:
    """Return a row for each source with the arguments of ``write_source``."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for part in corpus.parts:
        entry = {"split": part.split, "path": str(part.path), "first_key": part.first_key, "n": part.n_documents}
        parts.setdefault(part.source, []).append(entry)
    rows = [
        {"source": source, "parts": json.dumps(entries), "decisions": str(decisions), "work": str(work)}
        for source, entries in parts.items()
    ]
    return pa.Table.from_pylist(rows)


def write_source(source: str, parts: str, decisions: str, work: str) -> str:
    """Write ``documents/SOURCE/*.parquet`` and ``drops/SOURCE.parquet``; returns the counts of each split as JSON."""
    counts: dict[str, Any] = {}
    with ExitStack() as stack:
        drops = stack.enter_context(open_writer(Path(work) / "drops" / f"{source}.parquet", OUTPUT_DROP_SCHEMA))
        for part in json.loads(parts):
            counts[part["split"]] = _write_part(source, part, decisions, Path(work), drops)
    return json.dumps({source: counts})


def _write_part(source: str, part: dict[str, Any], decisions: str, work: Path, drops: Any) -> dict[str, Any]:
    decided = _decided(decisions, part["first_key"], part["first_key"] + part["n"])
    keys = np.asarray(decided.column("key"))
    counts: dict[str, Any] = {"read": [0, 0], "kept": [0, 0], "drops": {}}
    next_key = part["first_key"]
    with ExitStack() as stack:
        writer = None
        for table in _groups(part["path"]):
            if writer is None:
                path = work / "documents" / source / f"{part['split']}.parquet"
                writer = stack.enter_context(open_writer(path, table.schema))
            n = table.num_rows
            n_bytes = _total(table.column("n_bytes"))
            start, stop = np.searchsorted(keys, [next_key, next_key + n]).tolist()
            rows = keys[start:stop] - next_key
            next_key += n
            counts["read"] = [counts["read"][0] + n, counts["read"][1] + n_bytes]
            mask = np.ones(n, np.bool_)
            mask[rows] = False
            documents = table.filter(pa.array(mask))
            if documents.num_rows:
                writer.write_table(documents)
                n_kept, kept_bytes = counts["kept"]
                counts["kept"] = [n_kept + documents.num_rows, kept_bytes + _total(documents.column("n_bytes"))]
            if len(rows):
                dropped = table.select(["id", "n_bytes"]).take(pa.array(rows))
                _drop(source, part["split"], dropped, decided.slice(start, stop - start), drops, counts["drops"])
    return counts


def _drop(source: str, split: str, dropped: pa.Table, why: pa.Table, drops: Any, counts: dict[str, list[int]]) -> None:
    n = dropped.num_rows
    ids = dropped.column("id").to_pylist()
    assert ids == why.column("id").to_pylist(), f"decisions of other documents than those of {source}/{split}"
    columns = {
        "id": dropped.column("id"),
        "source": pa.array([source] * n, pa.string()),
        "split": pa.array([split] * n, pa.string()),
        **{name: why.column(name) for name in ("rule", "reason", "score", "partner")},
    }
    table = pa.Table.from_pydict({name: columns[name] for name in OUTPUT_DROP_SCHEMA.names})
    drops.write_table(table.cast(OUTPUT_DROP_SCHEMA))
    rules = np.asarray(why.column("rule").to_pylist())
    sizes = np.asarray(dropped.column("n_bytes"))
    for rule in np.unique(rules).tolist():
        n, n_bytes = counts.get(rule, [0, 0])
        mask = rules == rule
        counts[rule] = [n + int(mask.sum()), n_bytes + int(sizes[mask].sum())]


def _groups(path: str) -> Iterator[pa.Table]:
    """Yield the row groups of a documents file; an empty table if it has none."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.num_row_groups:
                yield file.schema_arrow.empty_table()
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def _decided(path: str, first: int, end: int) -> pa.Table:
    try:
        rows = pq.read_table(path, filters=[("key", ">=", first), ("key", "<", end)])
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}", hint="set from_stage=decisions and run again") from error
    return rows.combine_chunks()


def _total(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
