"""``smalti data curate``: normalises and filters documents and drops exact duplicates, in two passes.

Guarantees: the same inputs and config give the same files, byte for byte; every document that was read is either in
``documents/`` or in ``drops/``, and the report adds up. Memory: one batch of texts, and the keys of duplicates.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.base.progress import Progress, no_progress
from smalti.config.curate import CurateConfig
from smalti.data.documents.files import FoundFiles, find_files
from smalti.data.documents.heldout import HELDOUT, SPLITS
from smalti.data.documents.parquet import DROP_SCHEMA, RowWriter, documents_schema, rows_per_batch
from smalti.data.documents.publish import check_not_nested, parquet_digests, publication
from smalti.data.documents.readers import RAW_SCHEMA, ReadOptions, read_tasks
from smalti.data.prepare.curate.drop_list import find_listed, read_drop_list
from smalti.data.prepare.curate.duplicates import Duplicates, find_duplicates
from smalti.data.prepare.curate.examine import EMPTY_RULE, EXAMINED_SCHEMA, UNREADABLE_RULE, Examination
from smalti.data.prepare.curate.queries import TRAIN_KEY, transform
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Cut, Report, as_markdown

_READ_BYTES = 8 << 20
_STAGED_SCHEMA = pa.schema([("key", pa.int64()), ("source", pa.large_string()), *EXAMINED_SCHEMA])


def curate(config: CurateConfig, progress: Progress = no_progress) -> Report:
    """Curate the sources and write ``config.output``; returns the report, which is also written there.

    ``progress`` counts bytes of documents, or sources.

    Raises:
        UserError: the config does not match the files on disk.
        DataError: input is missing, broken or empty.
    """
    sources = {name: _find(name, config) for name in sorted(config.sources)}
    listed = {} if config.drop_documents is None else read_drop_list(config.drop_documents, config.sources)
    report = Report(
        skipped_files={name: files.skipped for name, files in sources.items() if files.skipped},
        heldout_frac=float(config.heldout_frac),
        by_group=config.group_field is not None,
    )
    with publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result:
        stage = result.work / ".stage"
        stage.mkdir()
        staged = {name: stage / f"{name}.parquet" for name in sources}
        n_bytes = sum(file.n_bytes for files in sources.values() for file in files.files)
        reader = _Reader(config, progress, n_bytes)
        for name, files in sources.items():
            repeated, cut = reader.stage(name, files, staged[name])
            if repeated:
                report.repeated_ids[name] = repeated
            if cut.documents:
                report.cut[name] = cut
        duplicates = find_duplicates(staged.values(), leaks_only=config.dedup == "none")
        listed_drops: dict[int, dict[str, Any]] = {}
        if config.drop_documents is not None:
            listed_drops, report.unknown_listed = find_listed(config.drop_documents, listed, staged)
        for number, (name, path) in enumerate(staged.items()):
            progress("writing", number, len(staged), "source")
            _write(name, path, result.work, (listed_drops, duplicates), report, config.sources[name].keep_fields)
            path.unlink()
        stage.rmdir()
        if not report.kept_documents:
            raise _no_documents(report, config)
        store.write_text(result.work / "report.md", as_markdown(report))
        result.record = report.as_json() | {
            "config": config.model_dump(mode="json", exclude={"output"}),
            "files": parquet_digests(result.work),
        }
        result.record["digest"] = digest_json(result.record["files"])
    return report


def _find(name: str, config: CurateConfig) -> FoundFiles:
    source = config.sources[name]
    check_not_nested(source.path, config.output, f"source '{name}' ({source.path})")
    return find_files(source.path, source.include)


class _Reader:
    """First pass: writes the examined documents of each source to one file, with keys in reading order."""

    def __init__(self, config: CurateConfig, progress: Progress, total_bytes: int) -> None:
        self.config = config
        self.progress = progress
        self.total_bytes = total_bytes
        self.next_key = 0
        self.done_bytes = 0

    def stage(self, name: str, files: FoundFiles, path: Path) -> tuple[int, Cut]:
        """Write ``path``; returns the number of documents with a repeated id, and the documents that were cut."""
        source = self.config.sources[name]
        options = ReadOptions(
            source.text_field,
            source.id_field,
            self.config.group_field,
            source.keep_fields,
            self.config.unreadable,
            max_document_bytes=self.config.max_document_bytes,
        )
        examination = Examination(
            source.rules, self.config.normalize, self.config.seed, float(self.config.heldout_frac)
        )
        start = self.done_bytes
        ids = set[int]()
        count = 0
        cut = Cut()
        with pq.ParquetWriter(path, _STAGED_SCHEMA, compression="zstd", compression_level=1) as writer:
            tasks = read_tasks(files.files, options)
            for batch in transform(tasks, RAW_SCHEMA, examination, EXAMINED_SCHEMA):
                count += batch.num_rows
                parts = [part for part in batch.column("part").to_pylist() if part is not None]
                cut.parts += len(parts)
                cut.documents += parts.count("1")
                # Hashes, because there can be many long ids; a collision only changes the count in a note.
                ids.update(map(hash, batch.column("id").to_pylist()))
                writer.write_batch(self._keyed(name, batch))
                self.done_bytes += sum(batch.column("n_raw_bytes").to_pylist())
                self.progress("reading", min(self.done_bytes, self.total_bytes), self.total_bytes)
        self.done_bytes = start + sum(file.n_bytes for file in files.files)
        return count - len(ids), cut

    def _keyed(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        first = self.next_key
        self.next_key += batch.num_rows
        keys = [
            first + row + (0 if split == HELDOUT else TRAIN_KEY)
            for row, split in enumerate(batch.column("split").to_pylist())
        ]
        columns = [pa.array(keys, pa.int64()), pa.array([name] * batch.num_rows, pa.large_string()), *batch.columns]
        return pa.RecordBatch.from_arrays(columns, schema=_STAGED_SCHEMA)


def _write(
    name: str,
    staged: Path,
    work: Path,
    drops_by_key: tuple[dict[int, dict[str, Any]], Duplicates],
    report: Report,
    keep_fields: tuple[str, ...],
) -> None:
    """Write the documents and drops of one source: the second pass."""
    schema = documents_schema(keep_fields)
    listed, duplicates = drops_by_key
    with ExitStack() as stack:
        drops = stack.enter_context(RowWriter(work / "drops" / f"{name}.parquet", DROP_SCHEMA))
        documents = {
            split: stack.enter_context(RowWriter(work / "documents" / name / f"{split}.parquet", schema))
            for split in SPLITS
        }
        for row in _rows(staged):
            counts = report.of(name, row["split"])
            row |= listed.get(row["key"], {}) | duplicates.of(row["key"])
            if row["rule"] is not None:
                counts.drop(row["rule"], row["n_raw_bytes"])
                drops.add({"source": name, **{key: row[key] for key in DROP_SCHEMA.names if key != "source"}})
            else:
                n_bytes = len(row["text"].encode())
                counts.keep(row["n_raw_bytes"], n_bytes)
                document = {key: row[key] for key in ("id", "text", "group")}
                document |= dict(zip(keep_fields, json.loads(row["numbers"] or "[]"), strict=True))
                documents[row["split"]].add(document | {"n_bytes": n_bytes}, n_bytes)
    for split in SPLITS:
        report.of(name, split).check()


def _rows(staged: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(staged) as file:
        for batch in file.iter_batches(batch_size=rows_per_batch(file, _READ_BYTES, 512)):
            yield from batch.to_pylist()


def _no_documents(report: Report, config: CurateConfig) -> DataError:
    """Return the error for an empty result, with the rules that dropped the documents and a hint."""
    rows = report.drop_rows()
    paths = ", ".join(source.path for source in config.sources.values())
    rules = {row[2] for row in rows}
    if not rules:
        return DataError(f"no document is left: the sources are empty ({paths})", hint="check the paths of the sources")
    message = f"no document is left: {', '.join(f'{row[2]} {row[3]}' for row in rows)}"
    hint = "choose milder rules (prose-light, code-light, none): sources.NAME.rules"
    if rules == {EMPTY_RULE}:
        message = f"{message}: there is no text in {paths}"
        hint = "the files are empty, or blank: check the paths"
    elif rules <= {UNREADABLE_RULE, EMPTY_RULE}:
        hint = "unreadable=stop names the first record and what is wrong with it"
    return DataError(message, hint=hint)
