"""Writes the output of a build: documents, the drops of all steps, and the report."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def publish(
    config: BuildConfig, digests: tuple[str, str], html: str, steps: Sequence[Path], progress: Progress
) -> BuildReport:
    """Replace ``config.output`` by the documents of the last of ``steps`` and the drops of all.

    ``digests`` identify inputs and recipe, and the annotated shards; ``steps`` are folders, that of ``select`` first.
    """
    selected, last = steps[0], steps[-1]
    progress("writing", 0, 1, "part")
    with publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result:
        for path in sorted((last / "documents").rglob("*.parquet")):
            to = result.work / path.relative_to(last)
            to.parent.mkdir(parents=True, exist_ok=True)
            _link(path, to)
        for path in sorted((selected / "drops").glob("*.parquet")):
            with open_writer(result.work / "drops" / path.name, OUTPUT_DROP_SCHEMA) as writer:
                for table in _drops([step / "drops" / path.name for step in steps]):
                    writer.write_table(table)
        report = BuildReport.of(config, html, steps)
        store.write_text(result.work / "report.md", report.as_markdown())
        files = parquet_digests(result.work)
        result.record = report.as_json() | {
            "config": identity(config) | {"output": None},
            "build_digest": digests[0],
            "shards_digest": digests[1],
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


def _drops(paths: Sequence[Path]) -> Iterator[pa.Table]:
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)
