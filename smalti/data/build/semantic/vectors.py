"""Vectors of documents: hashed words weighted by tf-idf, reduced by a randomized SVD (latent semantic analysis).

Words are those that near-duplicates are compared by. A vector has whole numbers and a length of about ``SCALE``, so
that the product of two is exact in float32, in any order of its sums (it is below 2^24): clusters and cosines do not
depend on threads or processes. Halko, Martinsson, Tropp: "Finding structure with randomness", arXiv 0909.4061.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.hashing import xxh3
from smalti.data.build.repeats.find import Block
from smalti.data.prepare.contamination.ngrams import normalised
from smalti.data.prepare.dedup.shingles import word_hashes

DIMS = 128
SCALE = 4000
SAMPLE = 16_384
"""Documents from which the reduction and the centroids are computed."""
CLUSTER_DOCUMENTS = 500
"""Mean size of a cluster."""
_BUCKET_BITS = 16
_MORE_DIMS = 16
_ROUNDS = 10
_TEXTS = 256
_TERMS = 1 << 16

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Terms:
    """The words of documents: sorted by row, a bucket and its weight each."""

    rows: I64
    buckets: I64
    values: F32
    n_rows: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Terms":
        """Count the words of texts; the weight of a word that occurs n times is 1 + ln n."""
        parts = [cls._part(texts[start : start + _TEXTS], start) for start in range(0, len(texts), _TEXTS)]
        return cls.joined(parts) if parts else cls._of_keys(np.empty(0, np.uint64), 0, 0)

    @classmethod
    def joined(cls, parts: Sequence["Terms"]) -> "Terms":
        """Join terms whose rows follow one another."""
        rows, buckets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "buckets"))
        return cls(rows, buckets, np.concatenate([part.values for part in parts]), parts[-1].n_rows)

    @classmethod
    def _part(cls, texts: Sequence[str], start: int) -> "Terms":
        words, rows = word_hashes(normalised(pa.array(texts, pa.large_string())))
        keys = (rows.astype(np.uint64) << np.uint64(_BUCKET_BITS)) | (words >> np.uint64(64 - _BUCKET_BITS))
        return cls._of_keys(keys, start, start + len(texts))

    @classmethod
    def _of_keys(cls, keys: npt.NDArray[np.uint64], start: int, n_rows: int) -> "Terms":
        distinct, counts = np.unique(keys, return_counts=True)
        rows = (distinct >> np.uint64(_BUCKET_BITS)).astype(np.int64) + start
        buckets = (distinct & np.uint64((1 << _BUCKET_BITS) - 1)).astype(np.int64)
        return cls(rows, buckets, (1 + np.log(counts)).astype(np.float32), n_rows)

    def times(self, matrix: F32) -> F32:
        """Return the product with a matrix that has a row for each bucket: [n_rows, columns]."""
        return _summed(self.rows, self.buckets, self.values, matrix, self.n_rows)

    def transposed_times(self, matrix: F32) -> F32:
        """Return the product of the transpose with a matrix that has a row for each document: [buckets, columns]."""
        order = np.argsort(self.buckets, kind="stable")
        return _summed(self.buckets[order], self.rows[order], self.values[order], matrix, 1 << _BUCKET_BITS)

    def weighted(self, weights: F32) -> "Terms":
        """Multiply by a weight of each bucket, and scale every row to a length of 1."""
        values = self.values * weights[self.buckets]
        lengths = np.sqrt(np.bincount(self.rows, values.astype(np.float64) ** 2, minlength=self.n_rows))
        return Terms(self.rows, self.buckets, (values / np.maximum(lengths, 1e-12)[self.rows]).astype(np.float32),
                     self.n_rows)  # fmt: skip


@dataclass(frozen=True)
class Space:
    """What turns words into vectors, and the centroids of clusters."""

    weights: F32
    basis: F32
    centroids: F32
    """Vectors: of whole numbers."""

    @classmethod
    def load(cls, path: str) -> "Space":
        """Read what ``write_space`` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(stored["weights"], stored["basis"], stored["centroids"])

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.int16]:
        """Return the vector of each text; zeros for one without words that the sample has."""
        return whole(Terms.of(texts).weighted(self.weights).times(self.basis))


def whole(vectors: F32) -> npt.NDArray[np.int16]:
    """Scale vectors to ``SCALE`` and round them; one of zeros stays as it is."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    scaled = vectors * (SCALE / np.maximum(lengths, 1e-6)) * (lengths > 1e-6)
    return np.asarray(np.rint(scaled), np.int16)


def write_sample(path: Path, block: Block, limit: int, seed: int) -> None:
    """Write the terms of a sample of a block: of the documents whose hash is below ``limit``."""
    texts = [text for id_, text in _rows(block) if xxh3(id_.encode(), seed) < limit]
    terms = Terms.of(texts)
    with open(path, "wb") as file:
        np.savez(file, rows=terms.rows, buckets=terms.buckets, values=terms.values, n_rows=terms.n_rows)


def write_space(path: Path, samples: Sequence[Path], n_documents: int, seed: int) -> int:
    """Compute weights, basis and centroids from samples; returns the number of clusters."""
    parts, at = [], 0
    for sample in samples:
        with np.load(sample, allow_pickle=False) as stored:
            n = int(stored["n_rows"])
            parts.append(Terms(stored["rows"] + at, stored["buckets"], stored["values"], at + n))
            at += n
    terms = Terms.joined(parts)
    documents = np.bincount(terms.buckets, minlength=1 << _BUCKET_BITS)
    # 0 for a bucket that the sample does not have: its direction is unknown.
    weights = np.where(documents > 0, np.log((1 + at) / (1 + documents)) + 1, 0).astype(np.float32)
    terms = terms.weighted(weights)
    basis = _basis(terms, seed)
    vectors = whole(terms.times(basis)).astype(np.float32)
    n_clusters = max(1, min(-(-n_documents // CLUSTER_DOCUMENTS), at // 8))
    centroids = _centroids(vectors, n_clusters)
    with open(path, "wb") as file:
        np.savez(file, weights=weights, basis=basis, centroids=centroids)
    return n_clusters


def write_vectors(path: Path, block: Block, space: str) -> None:
    """Write the vectors of a block and their clusters, those of the nearest centroid: [documents, DIMS + 2] int16."""
    loaded = Space.load(space)
    parts = [np.empty((0, DIMS + 2), np.int16)]
    texts = [text for _, text in _rows(block)]
    for start in range(0, len(texts), _TEXTS):
        vectors = loaded.vectors(texts[start : start + _TEXTS])
        clusters = nearest(vectors.astype(np.float32), loaded.centroids).astype("<i4")
        padded = np.zeros((len(vectors), DIMS), np.int16)
        padded[:, : vectors.shape[1]] = vectors
        parts.append(np.hstack([padded, clusters.view("<i2").reshape(-1, 2)]))
    with open(path, "wb") as file:
        np.save(file, np.concatenate(parts))


def nearest(vectors: F32, centroids: F32) -> I64:
    """Return the centroid with the largest product of each vector; of equal ones the first."""
    return np.asarray(np.argmax(vectors @ centroids.T, axis=1))


def _rows(block: Block) -> Iterator[tuple[str, str]]:
    with pq.ParquetFile(block.path, page_checksum_verification=True) as file:
        table = file.read_row_group(block.group, columns=["id", "text"])
    yield from zip(table.column("id").to_pylist(), table.column("text").to_pylist(), strict=True)


def _basis(terms: Terms, seed: int) -> F32:
    """Return the first right singular vectors: [buckets, up to DIMS]."""
    width = min(DIMS + _MORE_DIMS, max(1, terms.n_rows))
    matrix = np.random.default_rng(seed).standard_normal((1 << _BUCKET_BITS, width), np.float32)
    for _ in range(2):  # the second time a power iteration: the spectrum of words falls slowly
        rows, _ = np.linalg.qr(terms.times(matrix))
        matrix = terms.transposed_times(rows)
    squares, turns = np.linalg.eigh(matrix.T.astype(np.float64) @ matrix.astype(np.float64))
    chosen = np.flatnonzero(squares > 1e-9 * max(squares[-1], 1e-30))[::-1][:DIMS]
    return np.asarray(matrix @ (turns[:, chosen] / np.sqrt(squares[chosen])).astype(np.float32), np.float32)


def _centroids(vectors: F32, n: int) -> F32:
    """Return the centroids of spherical k-means, from evenly spaced vectors on."""
    centroids = vectors[np.arange(n) * len(vectors) // n] if len(vectors) else np.zeros((1, vectors.shape[1]))
    for _ in range(_ROUNDS):
        members = nearest(vectors, centroids.astype(np.float32))
        sums = np.zeros(centroids.shape, np.float64)
        np.add.at(sums, members, vectors)
        empty = ~sums.any(axis=1)
        sums[empty] = centroids[empty]
        moved = whole(sums.astype(np.float32)).astype(np.float32)
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return np.asarray(centroids, np.float32)


def _summed(groups: I64, items: I64, values: F32, matrix: F32, n: int) -> F32:
    """Return for each group the sum of values times rows of a matrix; ``groups`` ascend."""
    result = np.zeros((n, matrix.shape[1]), np.float32)
    for start in range(0, len(groups), _TERMS):
        part = slice(start, start + _TERMS)
        numbers = groups[part]
        firsts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        # A group may continue from the part before, so its sum is added.
        result[numbers[firsts]] += np.add.reduceat(values[part, None] * matrix[items[part]], firsts, axis=0)
    return result
