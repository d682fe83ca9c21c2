"""The step that drops documents which say nearly the same as another one, until a stated fraction is left (SemDeDup).

Vectors of hashed words, k-means, and within a cluster the documents that are nearest to one that stays: Abbas et al.,
"SemDeDup", arXiv 2303.09540. Guarantees: held-out documents stay, every drop has its partner and cosine, and the same
documents give the same bytes on any number of processes. Memory: the space of 16,384 sampled documents (about 1 GiB),
60 bytes for each document, and the ids of partners.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.data.build.repeats.find import Block, blocks_of
from smalti.data.build.semantic.choose import Task, dropped_of, edges_of, write_partners, write_scores
from smalti.data.build.semantic.vectors import (
    DIMS,
    I64,
    SAMPLE,
    write_sample,
    write_space,
    write_vectors,
)
from smalti.data.build.shards import Shard, run_shards
from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN
from smalti.data.documents.parquet import RowWriter
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report
from smalti.data.prepare.dedup.output import OUTPUT_DROP_SCHEMA

RULE = "semantic"
_TASK_DOCUMENTS = 16_384
_EXAMPLES = 5
_CHARACTERS = 160


def drop_similar(to: Path, before: Path, config: BuildConfig, progress: Progress) -> None:
    """Write ``documents/``, ``drops/`` and ``report.json`` into ``to``, from those of the step in ``before``."""
    assert config.semantic is not None
    sources = sorted(path.name for path in (before / "documents").iterdir())
    paths = [before / "documents" / source / f"{split}.parquet" for split in (HELDOUT, TRAIN) for source in sources]
    blocks = [block for path in paths for block in blocks_of(path)]
    counts = [block.n_rows for block in blocks]
    n_heldout = sum(block.n_rows for block in blocks if Path(block.path).stem == HELDOUT)
    work = to / "work"
    n_clusters = _write_vectors(work, blocks, counts, config, progress)
    tasks, edges = _tasks(work, sum(counts), n_heldout)
    n_drop = int((sum(counts) - n_heldout) * (1 - config.semantic.keep) + 1e-9)
    threshold = _choose(work, tasks, edges, n_heldout, n_drop, config, progress)
    pairs = _pairs(work, tasks, config, progress)
    names = _names(blocks, counts, pairs[:, 1].astype(np.int64))
    report, examples = Report(), _Examples(pairs)
    first = 0
    firsts: dict[str, int] = {}
    for block, n in zip(blocks, counts, strict=True):
        firsts.setdefault(block.path, first)
        first += n
    for source in sources:
        _write(to, before, source, firsts, (pairs, names), (report, examples))
    shutil.rmtree(work)
    record = {"format": 1, "kind": FORMAT_KIND, "complete": True, "entries": ["documents", "drops"]}
    figures = {"keep": float(config.semantic.keep), "threshold": threshold, "clusters": n_clusters,
               "documents": len(pairs), "examples": examples.rows()}  # fmt: skip
    store.write_json(to / RECORD_NAME, record | report.as_json() | {"semantic": figures})


def _write_vectors(
    work: Path, blocks: Sequence[Block], counts: Sequence[int], config: BuildConfig, progress: Progress
) -> int:
    """Write all vectors and clusters into one file; returns the number of clusters."""
    total = sum(counts)
    limit = min(2**64, (SAMPLE << 64) // max(total, 1))
    samples = [work / "samples" / f"{number:08d}.npz" for number in range(len(blocks))]
    tasks = [Shard(path, (block, limit, config.seed), block.n_bytes)
             for path, block in zip(samples, blocks, strict=True)]  # fmt: skip
    run_shards("counting words", write_sample, tasks, config, progress)
    progress("reducing words", 0, 1, "part")
    space = work / "space.npz"
    n_clusters = write_space(space, samples, total, config.seed)
    parts = [work / "vectors" / f"{number:08d}.npy" for number in range(len(blocks))]
    tasks = [Shard(path, (block, str(space)), block.n_bytes) for path, block in zip(parts, blocks, strict=True)]
    run_shards("computing vectors", write_vectors, tasks, config, progress)
    merged = np.lib.format.open_memmap(work / "vectors.npy", "w+", np.int16, (total, DIMS + 2)) if total else None
    at = 0
    for path, n in zip(parts, counts, strict=True):
        if merged is not None:
            merged[at : at + n] = np.load(path)
        at += n
        path.unlink()
    return n_clusters


def _tasks(work: Path, n: int, n_heldout: int) -> tuple[list[Task], I64]:
    """Write the documents in the order of their clusters; returns the tasks and the edges of groups."""
    if not n:
        return [], np.zeros(1, np.int64)
    vectors = np.load(work / "vectors.npy", mmap_mode="r")
    clusters = np.ascontiguousarray(vectors[:, DIMS:]).view("<i4")[:, 0]
    order = np.argsort(clusters, kind="stable")
    np.save(work / "order.npy", order)
    edges = edges_of(clusters[order])
    tasks, first = [], 0
    for index in range(1, len(edges)):
        if edges[index] - edges[first] >= _TASK_DOCUMENTS or index == len(edges) - 1:
            part = tuple(edges[first : index + 1].tolist())
            tasks.append(Task(str(work / "vectors.npy"), str(work / "order.npy"), part, n_heldout))
            first = index
    return tasks, edges


def _choose(
    work: Path, tasks: Sequence[Task], edges: I64, n_heldout: int, n_drop: int, config: BuildConfig, progress: Progress
) -> float | None:
    """Write which places in the order are dropped; returns the threshold."""
    if not tasks:
        return None
    paths = [work / "scores" / f"{number:08d}.npy" for number in range(len(tasks))]
    shards = [_shard(path, task) for path, task in zip(paths, tasks, strict=True)]
    run_shards("comparing documents", write_scores, shards, config, progress)
    scored = np.concatenate([np.load(path) for path in paths])
    groups = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    is_heldout = np.load(work / "order.npy") < n_heldout
    mask, threshold = dropped_of(scored[:, 0], scored[:, 1], groups, is_heldout, n_drop)
    np.save(work / "dropped.npy", mask)
    return None if threshold is None else float(threshold)


def _pairs(work: Path, tasks: Sequence[Task], config: BuildConfig, progress: Progress) -> Any:
    """Return (document, partner, cosine) of all drops, by document."""
    paths = [work / "partners" / f"{number:08d}.npy" for number in range(len(tasks))]
    dropped = str(work / "dropped.npy")
    shards = [_shard(path, task, dropped) for path, task in zip(paths, tasks, strict=True)]
    run_shards("finding partners", write_partners, shards, config, progress)
    pairs = np.concatenate([np.empty((0, 3)), *map(np.load, paths)])
    return pairs[np.argsort(pairs[:, 0], kind="stable")]


def _shard(path: Path, task: Task, *arguments: str) -> Shard:
    return Shard(path, (task, *arguments), 2 * DIMS * (task.edges[-1] - task.edges[0]))


def _names(blocks: Sequence[Block], counts: Sequence[int], documents: I64) -> pa.Array:
    """Return ``source/id`` of documents, in their order here."""
    wanted, places = np.unique(documents, return_inverse=True)
    parts, first = [pa.array([], pa.large_string())], 0
    for block, n in zip(blocks, counts, strict=True):
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + n)] - first
        if len(inside):
            with pq.ParquetFile(block.path) as file:
                ids = file.read_row_group(block.group, columns=["id"]).column("id").take(pa.array(inside)).to_pylist()
            source = Path(block.path).parent.name
            parts.append(pa.array([f"{source}/{id_}" for id_ in ids], pa.large_string()))
        first += n
    return pa.concat_arrays(parts).take(pa.array(places))


class _Examples:
    """Texts of the pairs nearest to the threshold, and of the most similar ones, collected while documents are read."""

    def __init__(self, pairs: Any) -> None:
        order = np.lexsort((pairs[:, 0], pairs[:, 2]))
        chosen = np.concatenate([order[:_EXAMPLES], order[max(_EXAMPLES, len(order) - _EXAMPLES) :]])
        self._pairs = [(int(pairs[at, 0]), int(pairs[at, 1]), float(pairs[at, 2])) for at in chosen]
        self._wanted = {number for first, second, _ in self._pairs for number in (first, second)}
        self._texts: dict[int, dict[str, str]] = {}

    def add(self, number: int, source: str, row: dict[str, Any]) -> None:
        if number in self._wanted:
            text = " ".join(row["text"][:_CHARACTERS].split())
            self._texts[number] = {"document": f"{source}/{row['id']}", "text": text}

    def rows(self) -> list[dict[str, Any]]:
        return [{"dropped": self._texts[first], "kept": self._texts[second], "cosine": value}
                for first, second, value in self._pairs]  # fmt: skip


def _write(
    to: Path, before: Path, source: str, firsts: dict[str, int], chosen: tuple[Any, pa.Array],
    figures: tuple[Report, _Examples],
) -> None:  # fmt: skip
    """Write the documents and drops of one source."""
    report, examples = figures
    pairs, names = chosen
    with ExitStack() as stack:
        drops = stack.enter_context(RowWriter(to / "drops" / f"{source}.parquet", OUTPUT_DROP_SCHEMA))
        for split in SPLITS:
            counts = report.of(source, split)
            path = before / "documents" / source / f"{split}.parquet"
            file = stack.enter_context(pq.ParquetFile(path, page_checksum_verification=True))
            documents = stack.enter_context(RowWriter(to / path.relative_to(before), file.schema_arrow))
            number = firsts.get(str(path), 0)
            at = int(np.searchsorted(pairs[:, 0], number))
            for group in range(file.num_row_groups):
                for row in file.read_row_group(group).to_pylist():
                    examples.add(number, source, row)
                    if at < len(pairs) and pairs[at, 0] == number:
                        counts.drop(RULE, row["n_bytes"])
                        reason = f"cosine {pairs[at, 2]:.4f} to a document that is kept"
                        drops.add({"id": row["id"], "source": source, "split": split, "rule": RULE, "reason": reason,
                                   "score": float(pairs[at, 2]), "partner": names[at].as_py()})  # fmt: skip
                        at += 1
                    else:
                        counts.keep(row["n_bytes"], row["n_bytes"])
                        documents.add(row, row["n_bytes"])
                    number += 1
            counts.check()
