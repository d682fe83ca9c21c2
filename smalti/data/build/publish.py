"""Writes the output of a build: documents, the drops of all steps, and the report."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.hashing import digest_json
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.config.identity import identity
from smalti.data.build.report import BuildReport
from smalti.data.documents.parquet import open_writer
from smalti.data.documents.publish import parquet_digests, publication
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME
from smalti.data.prepare.dedup.output import OUTPUT_DROP_SCHEMA


def publish(config: BuildConfig, digest: str, html: str, selected: Path, last: Path, progress: Progress) -> BuildReport:
    """Replace ``config.output`` by the documents of the step ``last`` and the drops of both steps.

    ``digest`` identifies inputs and recipe; ``selected`` is the folder of the step ``select``.
    """
    progress("writing", 0, 1, "part")
    with publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result:
        for path in sorted((last / "documents").rglob("*.parquet")):
            to = result.work / path.relative_to(last)
            to.parent.mkdir(parents=True, exist_ok=True)
            _link(path, to)
        for path in sorted((selected / "drops").glob("*.parquet")):
            with open_writer(result.work / "drops" / path.name, OUTPUT_DROP_SCHEMA) as writer:
                for table in _drops(path, last / "drops" / path.name if last != selected else None):
                    writer.write_table(table)
        report = BuildReport.of(config, html, selected, last)
        store.write_text(result.work / "report.md", report.as_markdown())
        files = parquet_digests(result.work)
        result.record = report.as_json() | {
            "config": identity(config) | {"output": None},
            "build_digest": digest,
            "files": files,
            "digest": digest_json(files),
        }
    return report


def _link(path: Path, to: Path) -> None:
    # A link costs nothing, and the step is removed afterwards; not all filesystems have links, nor across disks.
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def _drops(first: Path, second: Path | None) -> Iterator[pa.Table]:
    for path in (first, second):
        if path is None:
            continue
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table: Any = file.read_row_group(group)
                if "partner" not in table.column_names:
                    table = table.append_column("partner", pa.nulls(table.num_rows, pa.string()))
                yield table.select(OUTPUT_DROP_SCHEMA.names).cast(OUTPUT_DROP_SCHEMA)
