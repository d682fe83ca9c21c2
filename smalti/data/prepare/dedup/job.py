"""``smalti data dedup``: removes near-duplicate documents.

Guarantees: the same documents and config give the same files, byte for byte, on any runner and after any kill; a
document is dropped only if an exact count found it near to one that is kept; held-out documents are all kept; every
drop names its partner.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import RetryableError, UserError
from smalti.base.hashing import digest_json
from smalti.base.progress import Progress, no_progress
from smalti.config.dedup import DedupConfig
from smalti.config.identity import identity
from smalti.data.documents.publish import check_not_nested, only_writer, parquet_digests, publication
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report
from smalti.data.prepare.daft_engine import Failures, as_smalti_error
from smalti.data.prepare.dedup import selftest
from smalti.data.prepare.dedup.corpus import check_score_field, read_corpus
from smalti.data.prepare.dedup.output import source_tasks, write_source
from smalti.data.prepare.dedup.queries import Queries
from smalti.data.prepare.dedup.report import DedupReport, add_counts, as_markdown
from smalti.data.prepare.dedup.stages import Stages
from smalti.data.prepare.dedup.work_folder import WorkFolder


def dedup(config: DedupConfig, progress: Progress = no_progress) -> DedupReport:
    """Run all stages and write ``config.output``; returns the report, which is also written there.

    ``progress`` counts bytes of documents, or parts. An alarm of a source is in the report and raises nothing.

    Raises:
        DataError: ``config.documents`` is not the output of a curation, or is damaged.
        CheckFailed: the planted documents were not found (exit code 3).
    """
    corpus = read_corpus(config.documents)
    check_score_field(corpus, config.score_field)
    _check_output(config)
    # In a folder of the user, all stages are in one subfolder.
    work = (Path(config.work, "smalti-dedup") if config.work else Path(config.output, ".stages")).resolve()
    failures = Failures(work / "failures")
    queries = Queries(config, failures)
    with (
        _disk_full_hint(config.output, work),
        publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result,
        _locked(work),
    ):
        folder = WorkFolder(work, f"{corpus.digest} {queries.version}", config.from_stage)
        decisions = Stages(config, corpus, queries, progress).run(folder)
        progress("writing", 0, 1, "part")
        target = result.work.resolve()
        tasks = source_tasks(corpus, decisions / "decisions.parquet", target)
        counts: dict[str, Any] = {}
        for value in queries.map_tasks(write_source, tasks):
            counts |= json.loads(value)
        report = _report(config, decisions, dict(sorted(counts.items())))
        store.write_text(target / "report.md", as_markdown(report))
        files = parquet_digests(target)
        result.record = report.as_json() | {
            "config": identity(config),
            "documents_digest": corpus.digest,
            "files": files,
            "digest": digest_json(files),
        }
    if not config.keep_stages:
        shutil.rmtree(failures.folder, ignore_errors=True)
        folder.remove()
    return report


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Make the work folder and lock it for this process."""
    store.make_folder(work)
    with only_writer(work):
        yield


@contextmanager
def _disk_full_hint(output: str, work: Path) -> Iterator[None]:
    """Name the folders that the job writes to: a Parquet writer does not say which disk is full."""
    try:
        yield
    except (OSError, RetryableError) as error:
        converted = as_smalti_error(error, work)
        if not isinstance(converted, RetryableError):
            raise
        hint = f"free space in {work} (or name another folder: work=FOLDER) and {output}; then the same command again"
        raise RetryableError(converted.message, hint=hint) from error


def _check_output(config: DedupConfig) -> None:
    check_not_nested(config.documents, config.output, f"the documents ({config.documents})")
    record = Path(config.output) / RECORD_NAME
    if record.exists():
        written = store.read_json(record)
        if isinstance(written, dict) and written.get("complete") and "dedup" not in written:
            raise UserError(
                f"{config.output} was written by 'smalti data curate'; it would be lost",
                hint="name another output folder",
            )


def _report(config: DedupConfig, decisions: Path, counts: dict[str, Any]) -> DedupReport:
    figures = store.read_json(decisions / "figures.json")
    report = Report()
    for source, splits in counts.items():
        add_counts(report, source, splits)
    test = selftest.SelftestReport.of(figures["selftest"])
    numbers = (figures["candidates"], figures["near"], figures["histogram"])
    return DedupReport(report, test, config.alarm_frac, *numbers)
