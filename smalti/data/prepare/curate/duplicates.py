"""Exact duplicates among staged documents: which are dropped, and what is kept instead."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from smalti.data.prepare.curate.queries import TRAIN_KEY, first_of_equal


class _Keeper(NamedTuple):
    """The document that is kept among those with equal texts."""

    key: int
    name: str


def duplicate_drops(staged: Iterable[Path], *, leaks_only: bool = False) -> dict[int, dict[str, Any]]:
    """Return key -> rule, reason, score and partner (``source/id``, which is kept) of each exact duplicate.

    Args:
        staged: Parquet files with the columns key (see TRAIN_KEY), source, id, digest and rule.
        leaks_only: Return only training documents that equal a held-out one.
    """
    paths = [str(path) for path in staged]
    keepers: dict[int, int] = {}
    for row in first_of_equal(paths).to_pylist():
        leaks = row["key"] >= TRAIN_KEY > row["keeper_key"]
        if leaks or not leaks_only:
            keepers[row["key"]] = row["keeper_key"]
    names = _names(set(keepers.values()), paths)
    return {key: _drop(key, _Keeper(keeper, names[keeper])) for key, keeper in keepers.items()}


def _names(keys: set[int], paths: list[str]) -> dict[int, str]:
    """Return key -> ``source/id`` of the documents with these keys."""
    names: dict[int, str] = {}
    for path in paths if keys else ():
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["key", "source", "id"]):
                rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                names.update((key, f"{source}/{id_}") for key, source, id_ in rows if key in keys)
    return names


def _drop(key: int, keeper: _Keeper) -> dict[str, Any]:
    drop = {"score": 1.0, "partner": keeper.name}
    if key >= TRAIN_KEY > keeper.key:
        return drop | {"rule": "dedup/heldout", "reason": f"equal to the held-out document {keeper.name}"}
    return drop | {"rule": "dedup/exact", "reason": f"equal to {keeper.name}"}
