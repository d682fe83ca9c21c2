"""The step that applies the policy and drops exact duplicates; it writes a folder that ``smalti data dedup`` reads.

Memory: a batch of texts, the examples of the report, about 230 bytes for each document (measured without duplicates:
311 MiB for 40,000, 354 MiB for 240,000, most of it the comparison of digests), and what exact duplicates take.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smalti.base import store
from smalti.base.hashing import digest_json, xxh3
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.data.build.annotate import batches
from smalti.data.build.near_limits import NearLimits
from smalti.data.build.policy import Policy
from smalti.data.build.step_counts import StepCounts
from smalti.data.documents.files import FoundFiles
from smalti.data.documents.heldout import HELDOUT, SPLITS
from smalti.data.documents.parquet import DOCUMENT_SCHEMA, RowWriter
from smalti.data.documents.publish import parquet_digests
from smalti.data.prepare.curate.duplicates import Duplicates, find_duplicates, no_duplicates
from smalti.data.prepare.curate.queries import TRAIN_KEY
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report
from smalti.data.prepare.dedup.output import OUTPUT_DROP_SCHEMA

SELECTED_SCHEMA = pa.schema(
    [*DOCUMENT_SCHEMA, ("source", pa.string()), ("language", pa.string()), ("language_score", pa.float64())]
)
MARKED_SCHEMA = pa.schema([*SELECTED_SCHEMA, ("pii", pa.string())])
"""With ``pii: mark``: spans as JSON, [start, end, kind], in characters of ``text``."""
UNNAMABLE_RULE = "extract/name"

_DECISION_SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("source", pa.string()),
        ("id", pa.string()),
        ("rule", pa.string()),
        ("reason", pa.string()),
        ("score", pa.float64()),
        ("digest", pa.string()),
    ]
)


def select(
    to: Path,
    config: BuildConfig,
    found: Mapping[str, FoundFiles],
    shards: Mapping[str, Sequence[Path]],
    progress: Progress,
) -> None:
    """Write ``documents/``, ``drops/``, ``report.json`` and ``figures.json`` into ``to``.

    Args:
        found: Source -> its files.
        shards: Source -> its annotated shards, in order.
    """
    decisions = _decide(to / "decisions", Policy.of(config), shards, progress)
    duplicates = no_duplicates()
    if config.dedup != "none" or config.heldout_frac:
        duplicates = find_duplicates(decisions.values(), leaks_only=config.dedup == "none")
    report = Report(heldout_frac=float(config.heldout_frac))
    report.skipped_files = {name: files.skipped for name, files in found.items() if files.skipped}
    counts = StepCounts()
    limits = NearLimits()
    for number, source in enumerate(shards):
        progress("selecting", number, len(shards), "source")
        _write(
            to, source, config, found[source], shards[source], decisions[source], duplicates, (report, counts, limits)
        )
        decisions[source].unlink()
    (to / "decisions").rmdir()
    files = parquet_digests(to)
    record = {"format": 1, "kind": FORMAT_KIND, "complete": True, "entries": ["documents", "drops"]}
    store.write_json(to / RECORD_NAME, record | report.as_json() | {"files": files, "digest": digest_json(files)})
    store.write_json(to / "figures.json", {"counts": counts.as_json(), "near_limits": limits.as_json()})


def _decide(folder: Path, policy: Policy, shards: Mapping[str, Sequence[Path]], progress: Progress) -> dict[str, Path]:
    """Write the decision on each document, by source; returns the files."""
    key = 0
    decisions: dict[str, Path] = {}
    for number, (source, paths) in enumerate(shards.items()):
        progress("deciding", number, len(shards), "source")
        decisions[source] = folder / f"{source}.parquet"
        with RowWriter(decisions[source], _DECISION_SCHEMA) as writer:
            for row in _rows(paths):
                drop = policy.decide(row)
                writer.add(
                    {
                        "key": key + (0 if row["split"] == HELDOUT else TRAIN_KEY),
                        "source": source,
                        "id": row["id"],
                        "digest": row["digest"],
                        **({} if drop is None else drop._asdict()),
                    }
                )
                key += 1
    return decisions


def _write(
    to: Path,
    source: str,
    config: BuildConfig,
    found: FoundFiles,
    shards: Sequence[Path],
    decisions: Path,
    duplicates: Duplicates,
    figures: tuple[Report, StepCounts, NearLimits],
) -> None:
    """Write the documents and drops of one source."""
    report, counts, limits = figures
    schema = MARKED_SCHEMA if config.pii == "mark" else SELECTED_SCHEMA
    if config.quality_model is not None:
        schema = schema.append(pa.field("quality", pa.float64()))
    if any(item.code for item in config.inputs):
        schema = schema.append(pa.field("licence", pa.string()))
    ids = array("q")
    with ExitStack() as stack:
        drops = stack.enter_context(RowWriter(to / "drops" / f"{source}.parquet", OUTPUT_DROP_SCHEMA))
        documents = {
            split: stack.enter_context(RowWriter(to / "documents" / source / f"{split}.parquet", schema))
            for split in SPLITS
        }
        for path in found.unnamable:
            report.of(source, SPLITS[0]).drop(UNNAMABLE_RULE, 0)
            reason = "the name of the file is not UTF-8, or no URL can name it"
            drops.add({"id": path, "source": source, "split": SPLITS[0], "rule": UNNAMABLE_RULE, "reason": reason})
        for row, decision in zip(_rows(shards), _rows([decisions]), strict=True):
            assert row["id"] == decision["id"]
            ids.append(xxh3(row["id"].encode()) >> 1)
            limits.add(source, row, dropped_by=decision["rule"])
            decision |= duplicates.of(decision["key"])
            counts.add(row, decision["rule"])
            split = report.of(source, row["split"])
            if decision["rule"] is not None:
                split.drop(decision["rule"], row["n_raw_bytes"])
                drops.add({name: decision.get(name, row.get(name)) for name in OUTPUT_DROP_SCHEMA.names})
                continue
            n_bytes = len(row["text"].encode())
            split.keep(row["n_raw_bytes"], n_bytes)
            document = {name: row.get(name) for name in schema.names}
            documents[row["split"]].add(document | {"group": row["id"], "n_bytes": n_bytes}, n_bytes)
    for name in SPLITS:
        report.of(source, name).check()
    n_repeated = len(ids) - len(np.unique(np.frombuffer(ids, np.int64)))
    if n_repeated:
        report.repeated_ids[source] = n_repeated


def _rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for batch in batches(path):
            yield from batch
