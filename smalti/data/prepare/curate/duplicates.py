"""Exact duplicates among staged documents: which are dropped, and what is kept instead.

Memory: 16 bytes for each duplicate, and key and name of each document that is kept instead of one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smalti.data.prepare.curate.queries import TRAIN_KEY, first_of_equal

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Duplicates:
    """The duplicates by key, and the names of the documents that are kept."""

    keys: I64
    """Of the duplicates, ascending."""
    keepers: I64
    """The key of the document that is kept instead of each."""
    named: I64
    """The distinct keepers, ascending."""
    names: pa.Array
    """``source/id`` of each of ``named``."""

    def of(self, key: int) -> dict[str, Any]:
        """Return rule, reason, score and partner (``source/id``, which is kept) of a duplicate; else nothing."""
        place = int(np.searchsorted(self.keys, key))
        if place == len(self.keys) or self.keys[place] != key:
            return {}
        keeper = int(self.keepers[place])
        name = self.names[int(np.searchsorted(self.named, keeper))].as_py()
        drop = {"score": 1.0, "partner": name}
        if key >= TRAIN_KEY > keeper:
            return drop | {"rule": "dedup/heldout", "reason": f"equal to the held-out document {name}"}
        return drop | {"rule": "dedup/exact", "reason": f"equal to {name}"}


def no_duplicates() -> Duplicates:
    """Return an empty set of duplicates."""
    nothing = np.empty(0, np.int64)
    return Duplicates(nothing, nothing, nothing, pa.array([], pa.large_string()))


def find_duplicates(staged: Iterable[Path], *, leaks_only: bool = False) -> Duplicates:
    """Find the exact duplicates.

    Args:
        staged: Parquet files with the columns key (see TRAIN_KEY), source, id, digest and rule.
        leaks_only: Find only training documents that equal a held-out one.
    """
    paths = [str(path) for path in staged]
    table = first_of_equal(paths)
    keys, keepers = (table.column(name).to_numpy() for name in ("key", "keeper_key"))
    if leaks_only:
        leaks = (keys >= TRAIN_KEY) & (keepers < TRAIN_KEY)
        keys, keepers = keys[leaks], keepers[leaks]
    return Duplicates(keys, keepers, *_names(np.unique(keepers), paths))


def _names(wanted: I64, paths: list[str]) -> tuple[I64, pa.Array]:
    """Return the keys ``wanted``, ascending, and ``source/id`` of the documents with them."""
    keys: list[I64] = [wanted[:0]]
    names: list[pa.Array] = [pa.array([], pa.large_string())]
    for path in paths if len(wanted) else ():
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["key", "source", "id"]):
                of_batch = batch.column("key").to_numpy()
                chosen = np.isin(of_batch, wanted)
                rows = batch.filter(pa.array(chosen))
                source, id_ = (rows.column(name).cast(pa.large_string()) for name in ("source", "id"))
                names.append(pc.binary_join_element_wise(source, id_, pa.scalar("/", pa.large_string())))
                keys.append(of_batch[chosen])
    every = np.concatenate(keys)
    order = np.argsort(every)
    assert np.array_equal(every[order], wanted), "a document is equal to one that is not staged"
    return wanted, pa.concat_arrays(names).take(pa.array(order))
