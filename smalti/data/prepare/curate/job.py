"""``smalti data curate``: read, examine, find equals, write. Two passes over the documents, texts never all in memory.

Promises: the same inputs and config give the same files, byte for byte; every document that was read is either in
``documents/`` or in ``drops/``, and the report adds up. In memory are the duplicates and one batch of texts.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_file
from smalti.config.curate import CurateConfig
from smalti.data.documents.files import FoundFiles, find_files
from smalti.data.documents.heldout import HELDOUT, SPLITS
from smalti.data.documents.parquet import DROP_SCHEMA, RowWriter, documents_schema, rows_of
from smalti.data.documents.publish import publication
from smalti.data.documents.readers import RAW_SCHEMA, ReadOptions, read_tasks
from smalti.data.prepare.curate.examine import EMPTY_RULE, EXAMINED_SCHEMA, UNREADABLE_RULE, Examination
from smalti.data.prepare.curate.plan import TRAIN_KEY, first_of_equal, transform
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Cut, Report, as_markdown

Progress = Callable[..., None]
"""``progress(what, done, total)``: called often, in bytes of documents; ``progress(what, done, total, "source")``."""

_READ_BYTES = 8 << 20
_STAGED_SCHEMA = pa.schema([("key", pa.int64()), ("source", pa.large_string()), *EXAMINED_SCHEMA])


@dataclass(frozen=True)
class _Equal:
    """The document that stays, of some that are equal."""

    key: int
    name: str


def curate(config: CurateConfig, progress: Progress | None = None) -> Report:
    """Run the whole job and write ``config.output``; returns the report that is also written there.

    UserError for a config that does not fit what is on disk, DataError for input that is missing, broken or empty.
    """
    tell = progress or (lambda *told: None)
    found = {name: _find(name, config) for name in sorted(config.sources)}
    report = Report(
        skipped_files={name: files.skipped for name, files in found.items() if files.skipped},
        heldout_frac=float(config.heldout_frac),
        by_group=config.group_field is not None,
    )
    with publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result:
        stage = result.work / ".stage"
        stage.mkdir()
        staged = {name: stage / f"{name}.parquet" for name in found}
        read = _Reading(config, tell, sum(file.n_bytes for files in found.values() for file in files.files))
        for name, files in found.items():
            repeated, cut = read.stage(name, files, staged[name])
            if repeated:
                report.repeated_ids[name] = repeated
            if cut.documents:
                report.cut[name] = cut
        equals = _equals(config, [str(path) for path in staged.values()])
        for number, (name, path) in enumerate(staged.items()):
            tell("writing", number, len(staged), "source")
            _write(name, path, result.work, equals, report, config.sources[name].keep_fields)
            path.unlink()
        stage.rmdir()
        if not report.kept_documents:
            raise _nothing_left(report, config)
        store.write_text(result.work / "report.md", as_markdown(report))
        result.record = report.as_json() | {
            "config": config.model_dump(mode="json", exclude={"output"}),
            "files": _digests(result.work),
        }
        result.record["digest"] = digest_json(result.record["files"])
    return report


def _find(name: str, config: CurateConfig) -> FoundFiles:
    source = config.sources[name]
    here, output = os.path.realpath(source.path), os.path.realpath(config.output)
    if os.path.commonpath([here, output]) in (here, output) and (here == output or not os.path.isfile(here)):
        raise UserError(
            f"source '{name}' ({source.path}) and the output ({config.output}) lie one in the other",
            hint="choose an output folder beside the source",
        )
    return find_files(source.path, source.include)


class _Reading:
    """First pass: examined documents of each source into one file, with keys in reading order."""

    def __init__(self, config: CurateConfig, tell: Progress, total_bytes: int) -> None:
        self.config, self.tell, self.total_bytes = config, tell, total_bytes
        self.next_key = 0
        self.done_bytes = 0

    def stage(self, name: str, files: FoundFiles, path: Path) -> tuple[int, Cut]:
        """Write ``path``; returns how many documents repeat an id, and what was cut."""
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
        start, ids, count, cut = self.done_bytes, set[int](), 0, Cut()
        with pq.ParquetWriter(path, _STAGED_SCHEMA, compression="zstd", compression_level=1) as writer:
            tasks = read_tasks(files.files, options)
            for batch in transform(tasks, RAW_SCHEMA, examination, EXAMINED_SCHEMA):
                count += batch.num_rows
                parts = [part for part in batch.column("part").to_pylist() if part is not None]
                cut.parts += len(parts)
                cut.documents += parts.count("1")
                # Hashes, because ids can be long and many; a chance collision only adds to a note.
                ids.update(map(hash, batch.column("id").to_pylist()))
                writer.write_batch(self._keyed(name, batch))
                self.done_bytes += sum(batch.column("n_raw_bytes").to_pylist())
                self.tell("reading", min(self.done_bytes, self.total_bytes), self.total_bytes)
        self.done_bytes = start + sum(file.n_bytes for file in files.files)
        return count - len(ids), cut

    def _keyed(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        first, self.next_key = self.next_key, self.next_key + batch.num_rows
        keys = [
            first + row + (0 if split == HELDOUT else TRAIN_KEY)
            for row, split in enumerate(batch.column("split").to_pylist())
        ]
        columns = [pa.array(keys, pa.int64()), pa.array([name] * batch.num_rows, pa.large_string()), *batch.columns]
        return pa.RecordBatch.from_arrays(columns, schema=_STAGED_SCHEMA)


def _equals(config: CurateConfig, paths: list[str]) -> dict[int, _Equal]:
    """Key of each document that goes because an equal one stays. Without dedup only training equal to held-out goes."""
    keepers: dict[int, int] = {}
    for row in first_of_equal(paths).to_pylist():
        leaks = row["key"] >= TRAIN_KEY > row["keeper_key"]
        if leaks or config.dedup == "exact":
            keepers[row["key"]] = row["keeper_key"]
    names = _names(set(keepers.values()), paths)
    return {key: _Equal(keeper, names[keeper]) for key, keeper in keepers.items()}


def _names(keys: set[int], paths: list[str]) -> dict[int, str]:
    """``source/id`` of the documents with these keys."""
    names: dict[int, str] = {}
    for path in paths if keys else ():
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["key", "source", "id"]):
                rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                names.update((key, f"{source}/{id_}") for key, source, id_ in rows if key in keys)
    return names


def _write(
    name: str,
    staged: Path,
    work: Path,
    equals: dict[int, _Equal],
    report: Report,
    keep_fields: tuple[str, ...],
) -> None:
    """Second pass over one source."""
    schema = documents_schema(keep_fields)
    with ExitStack() as stack:
        drops = stack.enter_context(RowWriter(work / "drops" / f"{name}.parquet", DROP_SCHEMA))
        documents = {
            split: stack.enter_context(RowWriter(work / "documents" / name / f"{split}.parquet", schema))
            for split in SPLITS
        }
        for row in _rows(staged):
            account = report.of(name, row["split"])
            equal = equals.get(row["key"])
            if equal is not None:
                row |= _dropped_as_equal(row["key"], equal)
            if row["rule"] is not None:
                account.drop(row["rule"], row["n_raw_bytes"])
                drops.add({"source": name, **{key: row[key] for key in DROP_SCHEMA.names if key != "source"}})
            else:
                n_bytes = len(row["text"].encode())
                account.keep(row["n_raw_bytes"], n_bytes)
                kept = {key: row[key] for key in ("id", "text", "group")}
                kept |= dict(zip(keep_fields, json.loads(row["numbers"] or "[]"), strict=True))
                documents[row["split"]].add(kept | {"n_bytes": n_bytes}, n_bytes)
    for split in SPLITS:
        report.of(name, split).check()


def _rows(staged: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(staged) as file:
        for batch in file.iter_batches(batch_size=rows_of(file, _READ_BYTES, 512)):
            yield from batch.to_pylist()


def _dropped_as_equal(key: int, keeper: _Equal) -> dict[str, Any]:
    if key >= TRAIN_KEY > keeper.key:
        return {"rule": "dedup/heldout", "reason": f"equal to the held-out document {keeper.name}", "score": 1.0}
    return {"rule": "dedup/exact", "reason": f"equal to {keeper.name}", "score": 1.0}


def _digests(work: Path) -> dict[str, str]:
    files = sorted(path for path in work.rglob("*.parquet") if path.is_file())
    return {path.relative_to(work).as_posix(): sha256_file(path) for path in files}


def _nothing_left(report: Report, config: CurateConfig) -> DataError:
    """The error where no document is kept: what dropped them, and what helps against that."""
    rows = report.drop_rows()
    paths = ", ".join(source.path for source in config.sources.values())
    rules = {row[2] for row in rows}
    if not rules:
        return DataError(f"no document is left: the sources are empty ({paths})", hint="check the paths of the sources")
    message = f"no document is left: {', '.join(f'{row[2]} {row[3]}' for row in rows)}"
    hint = "choose milder rules (prose-light, code-light, none): sources.NAME.rules"
    if rules == {EMPTY_RULE}:
        message, hint = f"{message}: there is no text in {paths}", "the files are empty, or blank: check the paths"
    elif rules <= {UNREADABLE_RULE, EMPTY_RULE}:
        hint = "unreadable=stop names the first record and what is wrong with it"
    return DataError(message, hint=hint)
