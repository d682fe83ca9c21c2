"""Reads ``drop_documents``, the list of documents to drop, and finds them among the examined ones."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from smalti.base.errors import DataError
from smalti.data.documents.listed import read_listed

LISTED_RULE = "drop_documents"


def read_drop_list(path: str, sources: Collection[str]) -> dict[str, set[str]]:
    """Return source -> ids of the documents in the list. Raises DataError for a line that names none."""
    ids: dict[str, set[str]] = {}
    for source, document, line in read_listed(path, sources, kind="document", owner="curation"):
        if not isinstance(document, str):
            raise DataError(
                f"{path}, line {line}: {document!r} is not an id",
                allowed="an id in quotes; numbers of documents change with every curation",
            )
        ids.setdefault(source, set()).add(document)
    return ids


def find_listed(
    path: str, ids: Mapping[str, set[str]], staged: Mapping[str, Path]
) -> tuple[dict[int, dict[str, Any]], int]:
    """Return key -> drop of each listed document that no rule has dropped, and the number of ids that no document has.

    ``staged``: source -> Parquet file of its examined documents, with the columns key, id and rule.
    """
    drop = {"rule": LISTED_RULE, "reason": f"in {path}", "score": None}
    drops = {}
    n_unknown = 0
    for source, wanted in ids.items():
        unknown = set(wanted)
        with pq.ParquetFile(staged[source]) as file:
            for batch in file.iter_batches(columns=["key", "id", "rule"]):
                for key, name, rule in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    if name in wanted:
                        unknown.discard(name)
                        if rule is None:
                            drops[key] = drop
        n_unknown += len(unknown)
    return drops, n_unknown
