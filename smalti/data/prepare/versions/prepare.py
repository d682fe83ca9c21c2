"""Prepares versions of a set for trainings that are compared: training text of each, held-out text for all.

The result is a folder that ``smalti data tokenize`` reads: sources ``A``, ``B`` ..., and ``given`` (held-out text
only). Guarantees: training text is sampled by document, the same for equal sets; no held-out document is in the
training text of any version. Memory: the held-out sample, at most 4 MiB of text for each of these sources.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.base.progress import Progress, no_progress
from smalti.base.rng import derive_key
from smalti.data.documents.files import find_files
from smalti.data.documents.heldout import HELDOUT, TRAIN
from smalti.data.documents.parquet import DOCUMENT_SCHEMA, RowWriter, read_documents
from smalti.data.documents.publish import parquet_digests
from smalti.data.documents.readers import ReadOptions, ReadTask
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report, read_report
from smalti.data.prepare.versions.leaks import Leaks

EXTRA = "given"
_HELDOUT_BYTES = 4 << 20
_SEED = 17


@dataclass(frozen=True)
class Version:
    """A set of documents: the output of ``smalti data build``, ``curate`` or ``dedup``."""

    folder: str
    digest: str
    sources: dict[str, Any]

    @classmethod
    def of(cls, folder: str) -> "Version":
        """Read the record of a set. DataError if there is none."""
        record = read_report(folder)
        try:
            version = cls(folder, str(record["digest"]), record["sources"])
            version.documents(TRAIN), version.n_bytes(HELDOUT)
        except (KeyError, TypeError) as error:
            raise DataError(f"{folder}/{RECORD_NAME} is not whole: {error!r}", hint="build the set again") from error
        return version

    def documents(self, split: str) -> int:
        """Return the number of documents of a split."""
        return sum(int(splits[split]["documents"]["kept"]) for splits in self.sources.values())

    def n_bytes(self, split: str) -> int:
        """Return the bytes of text of a split."""
        return sum(int(splits[split]["bytes"]["kept"]) for splits in self.sources.values())

    def rows(self, split: str) -> Iterator[tuple[str, str]]:
        """Yield name (``source/id``) and text of each document."""
        for source in sorted(self.sources):
            for row in read_documents(Path(self.folder, "documents", source, f"{split}.parquet")):
                yield f"{source}/{row['id']}", row["text"]


def given_rows(path: str) -> Iterator[tuple[str | None, str]]:
    """Yield the documents of ``--heldout``: those that a set holds out, or all of a file or folder of documents."""
    if store.exists(store.join(path, RECORD_NAME)):
        version = Version.of(path)
        if not version.documents(HELDOUT):
            raise DataError(
                f"{path} holds no documents out",
                allowed="a set with held-out documents, or a file or folder of text, JSONL or Parquet",
                hint=f"heldout_frac=0.05 in its recipe, or name one file: {path}/documents/SOURCE/train.parquet",
            )
        yield from version.rows(HELDOUT)
        return
    for batch in ReadTask(find_files(path).files, ReadOptions(optional_id_field="id")).batches():
        for text in batch.column("text").to_pylist():
            yield None, text


def prepare(
    to: Path, versions: dict[str, Version], given: str | None, train_bytes: int, progress: Progress = no_progress
) -> dict[str, Any]:
    """Write ``to``; return documents and bytes by version, and of each held-out set those that were left out.

    Args:
        to: An empty or missing folder.
        versions: By the name that they have in the comparison.
        given: A further set of held-out documents (``given_rows``).
        train_bytes: About so much training text of each version is used; of a larger one a sample.
        progress: Counts bytes of training text.

    Raises:
        DataError: a version has no training documents, or no held-out text is left.
    """
    samples = {name: _sample(version.rows(HELDOUT)) for name, version in versions.items()}
    if given is not None:
        samples[EXTRA] = _sample(given_rows(given))
    heldout = [(name, *row) for name, rows in samples.items() for row in rows]
    leaks = Leaks([row[1] for row in heldout], [row[2] for row in heldout])
    report, facts = Report(), {}
    total = sum(version.n_bytes(TRAIN) for version in versions.values())
    done = 0
    for name, version in versions.items():
        facts[name] = _write_train(to, name, version, train_bytes, leaks, report, (progress, done, total))
        done += version.n_bytes(TRAIN)
    sets = _write_heldout(to, [*versions], heldout, leaks, report)
    if not any(entry["documents"] for entry in sets.values()):
        raise DataError(
            "no held-out text is left: " + ", ".join(map(_left_out, sets, sets.values())),
            allowed="documents that no version is trained on",
            hint="heldout_frac=0.05 in the recipe of all versions, or --heldout FOLDER with other documents",
        )
    files = parquet_digests(to)
    record = {"format": 1, "kind": FORMAT_KIND, "complete": True, "entries": ["documents"]}
    store.write_json(to / RECORD_NAME, record | report.as_json() | {"digest": digest_json(files)})
    return {"versions": facts, "heldout": {name: entry for name, entry in sets.items() if entry["documents"]}}


def _sample(rows: Iterator[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """Return the documents with the smallest keys of their texts, up to the limit of bytes, in the order of keys."""
    heap: list[tuple[int, int, str | None, str]] = []
    size = 0
    for number, (name, text) in enumerate(rows):
        heapq.heappush(heap, (-derive_key(_SEED, "heldout", text), -number, name, text))
        size += len(text.encode())
        while size > _HELDOUT_BYTES and len(heap) > 1:
            size -= len(heapq.heappop(heap)[3].encode())
    return [(name, text) for _, _, name, text in sorted(heap, reverse=True)]


def _write_train(
    to: Path,
    name: str,
    version: Version,
    train_bytes: int,
    leaks: Leaks,
    report: Report,
    shown: tuple[Progress, int, int],
) -> dict[str, Any]:
    n_bytes = version.n_bytes(TRAIN)
    if not n_bytes:
        raise DataError(f"{version.folder} holds no training documents", hint=f"see {version.folder}/report.md")
    limit = int(min(1.0, train_bytes / n_bytes) * 2.0**63)
    progress, done, total = shown
    counts = report.of(name, TRAIN)
    with RowWriter(to / "documents" / name / f"{TRAIN}.parquet", DOCUMENT_SCHEMA) as writer:
        for document, text in version.rows(TRAIN):
            is_read = derive_key(_SEED, "train", document) < limit
            leaks.add(document, text, is_read=is_read)
            size = len(text.encode())
            done += size
            if is_read:
                counts.keep(size, size)
                writer.add({"id": document, "text": text, "group": document, "n_bytes": size}, size)
                progress("reading the versions", done, total)
    if not counts.kept.documents:
        raise DataError(
            f"of {version.folder} no document was sampled: its {version.documents(TRAIN):,} documents are too long",
            hint="raise --tokens, or build the set with a smaller max_document_bytes",
        )
    return {
        "folder": version.folder,
        "digest": version.digest,
        "documents": version.documents(TRAIN),
        "bytes": n_bytes,
        "sampled_documents": counts.kept.documents,
        "sampled_bytes": counts.kept.n_bytes,
    }


def _write_heldout(
    to: Path, versions: list[str], rows: list[tuple[str, str | None, str]], leaks: Leaks, report: Report
) -> dict[str, dict[str, Any]]:
    """Write the documents that are not trained on; a set equal to that of an earlier version is not written again."""
    trained, near = (mask.tolist() for mask in leaks.result())
    sets: dict[str, dict[str, Any]] = {}
    first_with: dict[str, str] = {}
    names = dict.fromkeys([*versions, *(name for name, _, _ in rows)])
    for name in names:
        entry = sets[name] = {"documents": 0, "bytes": 0, "trained_on": 0, "near_trained": 0, "also_of": []}
        texts = {}
        for number, (of, _, text) in enumerate(rows):
            if of != name:
                continue
            if trained[number] or near[number] or not text.strip():
                entry["trained_on"] += trained[number]
                entry["near_trained"] += near[number]
            else:
                texts[number] = text
        first = first_with.setdefault(digest_json(sorted(texts.values())), name)
        if first != name and name != EXTRA and texts:
            sets[first]["also_of"].append(name)
            texts = {}
        counts = report.of(name, HELDOUT)
        with RowWriter(to / "documents" / name / f"{HELDOUT}.parquet", DOCUMENT_SCHEMA) as writer:
            for number, text in texts.items():
                size = len(text.encode())
                counts.keep(size, size)
                writer.add({"id": str(number), "text": text, "group": str(number), "n_bytes": size}, size)
                entry["documents"] += 1
                entry["bytes"] += size
    if EXTRA in names:  # the reader of the folder expects both files of a source
        with RowWriter(to / "documents" / EXTRA / f"{TRAIN}.parquet", DOCUMENT_SCHEMA):
            pass
    return sets


def _left_out(name: str, entry: dict[str, Any]) -> str:
    lost = entry["trained_on"] + entry["near_trained"]
    return f"{name} has {lost:,}, all of them trained on" if lost else f"{name} has none"
