"""Writes a corpus: files, rows of JSONL and Parquet, compressed and in several encodings."""

import gzip
import json
import os
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from build_planted.document import Document


def write(folder: Path, documents: list[Document]) -> None:
    """Write each document into the folder of its source; files that did not change are linked."""
    rows: dict[Path, list[Document]] = defaultdict(list)
    for document in documents:
        if document.container is not None:
            rows[folder / document.source / document.container].append(document)
            continue
        to = folder / document.source / document.name
        to.parent.mkdir(parents=True, exist_ok=True)
        if document.text is None:
            assert document.place is not None
            os.link(document.place, to)
        else:
            to.write_bytes(_encoded(document.text, document.notes[0] if document.source == "copies" else ""))
    for path, group in rows.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_rows(path, group)


def _encoded(text: str, form: str) -> bytes:
    if form == "utf-16":
        return text.encode("utf-16")
    if form == "crlf":
        return text.replace("\r\n", "\n").replace("\n", "\r\n").encode()
    return gzip.compress(text.encode(), mtime=0) if form == "gz" else text.encode()


def _write_rows(path: Path, group: list[Document]) -> None:
    if path.suffix == ".parquet":
        columns = {"id": [row.name for row in group], "text": [row.text for row in group]}
        pq.write_table(pa.table(columns), path, row_group_size=200)
        return
    data = "".join(json.dumps({"id": row.name, "text": row.text}) + "\n" for row in group).encode()
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    else:
        path.write_bytes(data)
