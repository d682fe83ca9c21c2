"""``smalti data diff``: how two versions of a built set differ, by source, step and reason.

A document is its source and id; of an id that is not unique the first counts with the first, the second with the
second. Memory: about 150 bytes for each document of the largest source. Ids and texts are compared by 64-bit hashes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.hashing import xxh3
from smalti.base.progress import Progress, no_progress
from smalti.config.identity import differing_rows
from smalti.config.show import flatten
from smalti.data.build.report import read_build, step_of
from smalti.data.documents.heldout import SPLITS
from smalti.data.documents.parquet import rows_per_batch, unreadable

_ROW = np.dtype([("id", "u8"), ("text", "u8"), ("n_bytes", "i8"), ("rule", "i4"), ("split", "i4")])
_KEPT, _ABSENT, _EDITED, _MOVED = 0, -1, -2, -3
_REASONS = {_ABSENT: ("input", "not read"), _EDITED: ("text", "edited"), _MOVED: ("split", "moved")}
_BATCH_BYTES = 8 << 20
_NEXT_OF_ID = np.uint64(0x9E3779B97F4A7C15)

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class _Version:
    """A built set."""

    folder: str
    record: dict[str, Any]

    @classmethod
    def of(cls, folder: str) -> "_Version":
        return cls(folder, read_build(folder))

    def rows(self, source: str, rules: list[str]) -> Rows:
        """Return the documents and drops of a source, sorted by id; ``rules`` grows by the rules of its drops."""
        parts = [np.empty(0, _ROW)]
        for number, path in enumerate(self._documents(source)):
            for batch in _batches(path, ["id", "text", "n_bytes"]):
                part = np.zeros(batch.num_rows, _ROW)
                part["id"] = _hashes(batch.column("id"))
                part["text"] = _hashes(batch.column("text"))
                part["n_bytes"] = batch.column("n_bytes").to_numpy()
                part["split"] = number
                parts.append(part)
        for batch in _batches(self._drops(source), ["id", "rule"]):
            part = np.zeros(batch.num_rows, _ROW)
            part["id"] = _hashes(batch.column("id"))
            names = batch.column("rule").to_pylist()
            rules += sorted(set(names) - set(rules))
            part["rule"] = [rules.index(name) for name in names]
            parts.append(part)
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows["id"], kind="stable")]
        if len(rows):
            firsts = np.concatenate([[True], rows["id"][1:] != rows["id"][:-1]])
            place = np.arange(len(rows))
            rank = place - np.maximum.accumulate(np.where(firsts, place, 0))
            rows["id"] += rank.astype(np.uint64) * _NEXT_OF_ID  # the second of an id is another document
        return rows[np.argsort(rows["id"], kind="stable")]

    def ids(self, source: str, wanted: set[int]) -> dict[int, str]:
        """Return the ids with these hashes."""
        names: dict[int, str] = {}
        for path in [*self._documents(source), self._drops(source)] if wanted else []:
            for batch in _batches(path, ["id"]):
                for id_ in batch.column("id").to_pylist():
                    value = xxh3(id_.encode())
                    if value in wanted:
                        names[value] = id_
        return names

    def _documents(self, source: str) -> list[Path]:
        return [Path(self.folder, "documents", source, f"{split}.parquet") for split in SPLITS]

    def _drops(self, source: str) -> Path:
        return Path(self.folder, "drops", f"{source}.parquet")


def diff(first: str, second: str, n_examples: int = 3, progress: Progress = no_progress) -> dict[str, Any]:
    """Compare the outputs of two builds.

    Returns:
        ``recipe``: the fields that differ; ``totals``: documents and bytes; ``added``, ``removed`` and ``changed``:
        a row for each source, step and rule. Of an added document step and rule are those that had dropped it in
        ``first``, of a removed one those that drop it in ``second``; ``input`` where that version has not read it.
    """
    versions = _Version.of(first), _Version.of(second)
    sources = sorted({source for version in versions for source in version.record["sources"]})
    kinds: dict[str, list[dict[str, Any]]] = {"added": [], "removed": [], "changed": []}
    unchanged = (0, 0)
    for number, source in enumerate(sources):
        progress("comparing", number, len(sources), "source")
        rows, same = _compare(versions, source, n_examples)
        unchanged = unchanged[0] + same[0], unchanged[1] + same[1]
        for kind in kinds:
            kinds[kind] += rows[kind]
    totals = {
        name: {unit: sum(row[unit] for row in rows) for unit in ("documents", "bytes")} for name, rows in kinds.items()
    }
    totals["unchanged"] = {"documents": unchanged[0], "bytes": unchanged[1]}
    recipes = [flatten(version.record.get("config", {})) for version in versions]
    sizes = [_kept(version.record) for version in versions]
    return {
        "first": {"folder": first, **sizes[0]},
        "second": {"folder": second, **sizes[1]},
        "recipe": differing_rows(recipes),
        "totals": totals,
        **kinds,
    }


def _compare(
    versions: tuple[_Version, _Version], source: str, n_examples: int
) -> tuple[dict[str, list[dict[str, Any]]], tuple[int, int]]:
    """Return the rows of a source by kind, and the number and bytes of its unchanged documents."""
    rules = [""]
    rows = [version.rows(source, rules) for version in versions]
    ids = np.union1d(rows[0]["id"], rows[1]["id"])
    old, new = (_aligned(part, ids) for part in rows)
    was, stays = old["rule"] == _KEPT, new["rule"] == _KEPT
    same_split = old["split"] == new["split"]
    same = was & stays & same_split & (old["text"] == new["text"])
    changes = np.where(same_split, _EDITED, _MOVED)
    groups = [
        ("added", stays & ~was, old["rule"], new["n_bytes"], new),
        ("removed", was & ~stays, new["rule"], old["n_bytes"], old),
        ("changed", was & stays & ~same, changes, new["n_bytes"] - old["n_bytes"], new),
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for kind, mask, codes, n_bytes, of in groups:
        kinds[kind] = []
        for code in np.unique(codes[mask]).tolist():
            chosen = mask & (codes == code)
            step, rule = _REASONS[code] if code in _REASONS else (step_of(rules[code]), rules[code])
            row = {"source": source, "step": step, "rule": rule, "documents": int(chosen.sum())}
            hashes = of["id"][chosen][:n_examples].tolist()
            kinds[kind].append(row | {"bytes": int(n_bytes[chosen].sum()), "examples": hashes})
    every = [row for rows_of_kind in kinds.values() for row in rows_of_kind]
    wanted = {value for row in every for value in row["examples"]}
    names = versions[0].ids(source, wanted) | versions[1].ids(source, wanted)
    for row in every:
        row["examples"] = sorted(names[value] for value in row["examples"] if value in names)
    return kinds, (int(same.sum()), int(new["n_bytes"][same].sum()))


def _aligned(rows: Rows, ids: Rows) -> Rows:
    """Return a row for each of ``ids``; where there is none its rule is ``_ABSENT``."""
    aligned = np.zeros(len(ids), _ROW)
    aligned["id"] = ids
    aligned["rule"] = _ABSENT
    aligned[np.searchsorted(ids, rows["id"])] = rows
    return aligned


def _kept(record: dict[str, Any]) -> dict[str, int]:
    splits = [split for source in record["sources"].values() for split in source.values()]
    return {unit: sum(split[unit]["kept"] for split in splits) for unit in ("documents", "bytes")}


def _hashes(column: pa.Array) -> npt.NDArray[np.uint64]:
    return np.fromiter((xxh3(value.encode()) for value in column.to_pylist()), np.uint64, len(column))


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if not path.exists():
        return
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield from file.iter_batches(batch_size=rows_per_batch(file, _BATCH_BYTES, 8192), columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
