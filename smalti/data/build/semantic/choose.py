"""Chooses within clusters which documents stay, for any threshold at once.

Documents are taken in an order in which the next is always the one that is least near to those taken before (Gonzalez,
"Clustering to minimize the maximum intercluster distance", 1985). Its score is the largest cosine to these, and never
falls. So for each threshold those below it are the ones that stay: no two of them are nearer than the threshold, and
each of the others is as near or nearer to one that stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.build.semantic.vectors import DIMS, F32, I64

GROUP_DOCUMENTS = 8192
"""A larger cluster is split, in the order of documents: its time grows with the square."""
_TILE = 512
_FIRST = -2.0
"""Score of a document that is compared with none, and of held-out ones, which stay."""

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """Groups of documents: ``order[first:end]``, split at ``edges``. Plain data."""

    vectors: str
    """File of all vectors, in the order of documents."""
    order: str
    """File of the numbers of documents, sorted by cluster."""
    edges: tuple[int, ...]
    n_heldout: int
    """Documents below this number are held out."""

    def groups(self) -> Iterator[tuple[int, I64, F32]]:
        """Yield for each group its first place in ``order``, its documents, and their vectors."""
        vectors, order = np.load(self.vectors, mmap_mode="r"), np.load(self.order, mmap_mode="r")
        for first, end in zip(self.edges, self.edges[1:], strict=False):
            documents = np.array(order[first:end], np.int64)
            yield first, documents, np.asarray(vectors[documents, :DIMS], np.float32)


def write_scores(path: Path, task: Task) -> None:
    """Write score and rank of each document of a task, in the order of its documents."""
    parts = [np.empty((0, 2))]
    for _, documents, vectors in task.groups():
        parts.append(np.column_stack(scores(vectors, documents < task.n_heldout)))
    _save(path, np.concatenate(parts))


def write_partners(path: Path, task: Task, dropped: str) -> None:
    """Write (document, partner, cosine) of each dropped document: the nearest of those that stay in its group."""
    marks = np.load(dropped, mmap_mode="r")
    rows = [np.empty((0, 3))]
    for first, documents, vectors in task.groups():
        gone = np.array(marks[first : first + len(documents)], np.bool_)
        if not gone.any():
            continue
        stay, places = np.flatnonzero(~gone), np.flatnonzero(gone)
        for start in range(0, len(places), _TILE):
            part = places[start : start + _TILE]
            cosines = cosine(vectors[part], vectors[stay])
            best = np.argmax(cosines, axis=1)
            rows.append(np.column_stack([documents[part], documents[stay[best]], cosines[np.arange(len(part)), best]]))
    _save(path, np.concatenate(rows))


def scores(vectors: F32, is_heldout: npt.NDArray[np.bool_]) -> tuple[F64, F64]:
    """Return the score of each document of a group, and its rank in the order in which they are taken."""
    n = len(vectors)
    values, ranks = np.full(n, _FIRST), np.zeros(n)
    left = ~is_heldout
    largest = np.full(n, _FIRST)
    heldout = vectors[is_heldout]
    for start in range(0, len(heldout), _TILE):
        largest = np.maximum(largest, cosine(vectors, heldout[start : start + _TILE]).max(axis=1))
    for rank in range(1, int(left.sum()) + 1):
        if rank == 1 and not len(heldout):  # the most typical one
            chosen = int(np.argmax(vectors.astype(np.float64) @ vectors.sum(axis=0, dtype=np.float64)))
        else:
            chosen = int(np.argmin(np.where(left, largest, np.inf)))
        values[chosen], ranks[chosen], left[chosen] = largest[chosen], rank, False
        np.maximum(largest, cosine(vectors, vectors[chosen : chosen + 1])[:, 0], out=largest)
    return values, ranks


def cosine(first: F32, second: F32) -> F64:
    """Return the cosines of vectors of whole numbers; 0 with a vector of zeros. Equal on every machine."""
    products = (first @ second.T).astype(np.float64)
    squares = [np.maximum((part.astype(np.float64) ** 2).sum(axis=1), 1.0) for part in (first, second)]
    return np.asarray(products / np.sqrt(squares[0][:, None] * squares[1][None, :]))


def dropped_of(values: F64, ranks: F64, groups: I64, is_heldout: npt.NDArray[np.bool_], n_drop: int) -> Any:
    """Return the mask of the ``n_drop`` documents with the highest scores, and the lowest score of these (None: none).

    Of equal scores the last of the last group are dropped, so that within a group those that stay were taken first.
    """
    mask = np.zeros(len(values), np.bool_)
    candidates = np.flatnonzero(~is_heldout & (values > _FIRST))
    order = candidates[np.lexsort((ranks[candidates], groups[candidates], values[candidates]))]
    chosen = order[max(0, len(order) - n_drop) :]  # of each group one stays
    mask[chosen] = True
    return mask, float(values[chosen].min()) if len(chosen) else None


def edges_of(clusters: I64) -> I64:
    """Return the edges of groups in sorted clusters: where a cluster ends, and within one of too many documents."""
    bounds = np.flatnonzero(np.concatenate([[True], clusters[1:] != clusters[:-1]]))
    ends = np.append(bounds[1:], len(clusters))
    parts = [np.arange(first, end, GROUP_DOCUMENTS) for first, end in zip(bounds, ends, strict=True)]
    return np.concatenate([*parts, [len(clusters)]]).astype(np.int64)


def _save(path: Path, values: npt.NDArray[Any]) -> None:
    with open(path, "wb") as file:
        np.save(file, values)
