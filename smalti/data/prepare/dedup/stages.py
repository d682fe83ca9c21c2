"""The stages of a deduplication: signatures, boilerplate, candidates, shingles, pairs, decisions.

Each reads the folders of the stages before it and writes its own. Memory: texts and signatures in portions of
``memory_gb``; the driver holds numbers only, of the documents that have a partner.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.progress import Progress
from smalti.config.dedup import DedupConfig
from smalti.data.prepare.dedup import selftest
from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.corpus import Corpus, Task
from smalti.data.prepare.dedup.decide import Near, Ordered
from smalti.data.prepare.dedup.frames import n_rows_of
from smalti.data.prepare.dedup.queries import Queries
from smalti.data.prepare.dedup.work_folder import WorkFolder

# Approximate memory that Daft needs.
_BYTES_A_BAND = 100
"""Memory for one document in one band."""
_BYTES_A_PAIR = 100
"""Memory for one pair that a band proposes, until duplicates of other bands are removed."""
_BYTES_A_SHINGLE = 50
"""Memory for one shingle that is counted."""
_BYTES_A_WORD = 6
"""Lower bound on the mean length of a word and its blank."""
_CORE_THRESHOLD = 0.65
"""A higher threshold leaves out the same parts of texts, so that it needs no new stages."""
_HISTOGRAM_BINS = 20
_NEIGHBOURS_KEPT = 2
"""Number of kept documents near to a dropped one that are compared with all other documents near to it."""
_MAX_ROUNDS = 20
"""Bound on the rounds of ``_complete``; it converges after two or three."""

_PAIRS = pa.schema([("a", pa.int64()), ("b", pa.int64())])
_COMPARED = pa.schema([*_PAIRS, ("jaccard", pa.float64()), ("containment", pa.float64())])


@dataclass
class Stages:
    """The stages of one run."""

    config: DedupConfig
    corpus: Corpus
    queries: Queries
    progress: Progress

    def run(self, folder: WorkFolder) -> Path:
        """Run the stages whose results ``folder`` lacks; returns the folder of the decisions."""
        config = self.config
        signing = ("shingle_words", "bands", "rows", "score_field", "selftest_documents", "seed")
        signatures = folder.stage("signatures", _settings(config, signing), self._signatures)
        max_core_frac = 1 - min(config.threshold, _CORE_THRESHOLD)
        masking = _settings(config, ("boilerplate_documents",)) | {"max_core_frac": max_core_frac}
        boilerplate = folder.stage("boilerplate", masking, lambda to: self._boilerplate(signatures, max_core_frac, to))
        limits = _settings(config, ("bucket_documents", "bucket_neighbours"))
        candidates = folder.stage("candidates", limits, lambda to: self._candidates(signatures, boilerplate, to))
        shingles = folder.stage(
            "shingles", {}, lambda to: self._shingles(signatures, boilerplate, candidates / "pairs", to)
        )
        pairs = folder.stage("pairs", {}, lambda to: self._compare(candidates / "pairs", shingles, to / "rows"))
        bounds = _settings(config, ("threshold", "containment", "selftest_recall", "selftest_precision"))
        return folder.stage(
            "decisions", bounds, lambda to: self._decisions(signatures, boilerplate, shingles, pairs / "rows", to)
        )

    def _signatures(self, to: Path) -> None:
        selftest.plant(self.corpus, self.config, self.queries.normalised, to / "planted.parquet")
        # The planted file moves with its stage, so its tasks are made from the path that it has now.
        tasks = [*selftest.planted_tasks(to / "planted.parquet"), *self.corpus.tasks()]
        self._in_portions("signatures", tasks, lambda portion: self.queries.signatures(portion, to / "rows"))
        n_rows = n_rows_of(to / "rows")
        n_planted = pq.read_metadata(to / "planted.parquet").num_rows
        assert n_rows == self.corpus.n_documents + n_planted, (
            f"{n_rows} signatures of {self.corpus.n_documents} documents"
        )

    def _boilerplate(self, signatures: Path, max_core_frac: float, to: Path) -> None:
        """Find what is left out of the comparison; ``compared`` holds the documents that this changes."""
        queries = self.queries
        rows = signatures / "rows"
        queries.equal(rows, to / "equal")
        queries.repetitive(rows, to / "seen" / "repetitive")
        if self.config.boilerplate_documents is not None:
            for number, (bands, part) in enumerate(self._band_groups(self.corpus.n_documents * _BYTES_A_BAND)):
                self.progress("boilerplate", number, self.config.bands, "part")
                queries.crowds(rows, to / "equal", bands, part, to / "seen" / f"{number}")
        keys = crowd = np.empty(0, np.int64)
        for folder in sorted((to / "seen").iterdir()):
            for table in _tables(folder):
                table_keys = _column(table, "key")
                in_crowd = _column(table, "crowd") & (table_keys < PLANTED)
                keys = np.union1d(keys, table_keys)
                crowd = np.union1d(crowd, table_keys[in_crowd])
        tasks = self._tasks_of(keys, signatures)
        self._in_portions("boilerplate", tasks, lambda portion: queries.words(portion, to / "words"))
        common = [np.empty(0, np.int64)]
        if len(crowd):
            n_bytes = sum(task.n_bytes for task in tasks) * _BYTES_A_SHINGLE // _BYTES_A_WORD
            n_parts = math.ceil(n_bytes / (self.config.memory_gb * 2**30))
            common += [queries.common(to / "words", pa.table({"key": crowd}), (i, n_parts)) for i in range(n_parts)]
        np.save(to / "common.npy", np.concatenate(common))
        if tasks:
            queries.compared(
                to / "words", to / "seen" / "repetitive", to / "common.npy", max_core_frac, to / "compared"
            )
        shutil.rmtree(to / "seen")

    def _candidates(self, signatures: Path, boilerplate: Path, to: Path) -> None:
        # Bands are alike, so the pairs of one band are an estimate for each.
        pairs_bytes = self.queries.count_pairs(signatures / "rows", boilerplate, 0) * _BYTES_A_PAIR
        groups = self._band_groups(self.corpus.n_documents * _BYTES_A_BAND + pairs_bytes)
        for number, (bands, part) in enumerate(groups):
            self.progress("candidates", number, len(groups), "part")
            self.queries.candidates(signatures / "rows", boilerplate, bands, part, to / "parts" / f"{number}")
        if len(groups) == 1:
            os.replace(to / "parts" / "0", to / "pairs")
        else:
            self.queries.distinct(to / "parts", to / "pairs")
        shutil.rmtree(to / "parts")

    def _band_groups(self, band_bytes: int) -> list[tuple[Sequence[int], tuple[int, int]]]:
        """Return groups of bands, with shards (i, n) of them, that fit into memory if a band takes ``band_bytes``."""
        n_parts = math.ceil(self.config.bands * band_bytes / (self.config.memory_gb * 2**30))
        bands = range(self.config.bands)
        per_part = math.ceil(self.config.bands / n_parts)
        groups = [bands[start : start + per_part] for start in range(0, self.config.bands, per_part)]
        n_shards = math.ceil(n_parts / len(groups))
        return [(group, (shard, n_shards)) for group in groups for shard in range(n_shards)]

    def _tasks_of(self, keys: npt.NDArray[np.int64], signatures: Path) -> list[Task]:
        """Return tasks that read these documents, including planted ones."""
        planted = keys[keys >= PLANTED]
        tasks = self.corpus.tasks_of(keys[keys < PLANTED])
        if len(planted):
            (task,) = selftest.planted_tasks(signatures / "planted.parquet")
            tasks.append(replace(task, rows=(planted - PLANTED).tolist()))
        return tasks

    def _shingles(self, signatures: Path, boilerplate: Path, pairs: Path, to: Path) -> None:
        keys = np.empty(0, np.int64)
        for table in _tables(pairs):
            keys = np.unique(np.concatenate([keys, _column(table, "a"), _column(table, "b")]))
        keys = np.setdiff1d(keys, _column(_integers(boilerplate / "words", ["key"]), "key"))
        tasks = self._tasks_of(keys, signatures)
        self._in_portions("shingles", tasks, lambda portion: self.queries.shingles(portion, to / "rows"))
        if n_rows_of(boilerplate / "words"):
            self.queries.shingles_of(boilerplate / "words", boilerplate / "compared", to / "rows")
        (to / "rows").mkdir(exist_ok=True)

    def _compare(self, pairs: Path, shingles: Path, to: Path) -> None:
        """Write the similarity of each pair to ``to``."""
        n_pairs = n_rows_of(pairs)
        if not n_pairs:
            to.mkdir()
            return
        metadata = [pq.read_metadata(path) for path in (shingles / "rows").glob("*.parquet")]
        n_bytes = sum(file.row_group(i).total_byte_size for file in metadata for i in range(file.num_row_groups))
        mean_bytes = n_bytes / max(sum(file.num_rows for file in metadata), 1)
        n_parts = math.ceil(n_pairs * 2 * mean_bytes / (self.config.memory_gb * 2**30))
        for number in range(n_parts):
            self.progress("comparing", number, n_parts, "part")
            self.queries.compare(pairs, shingles / "rows", (number, n_parts), to)
        n_compared = n_rows_of(to)
        assert n_compared == n_pairs, f"{n_compared} of {n_pairs} pairs were compared"

    def _decisions(self, signatures: Path, boilerplate: Path, shingles: Path, compared: Path, to: Path) -> None:
        self.progress("deciding", 0, 1, "part")
        config = self.config
        histogram = np.zeros(_HISTOGRAM_BINS, np.int64)
        near = self._near(compared, histogram)
        equal = _integers(boilerplate / "equal", ["key", "node"]).sort_by("key")
        keys = np.unique(np.concatenate([_column(near, "a"), _column(near, "b"), _column(equal, "key")]))
        documents = self.queries.about(signatures / "rows", pa.table({"key": keys}))
        ordered = Ordered(documents, _column(equal, "key"), _column(equal, "node"))
        near = self._complete(ordered, near, shingles, to, histogram)
        dropped = ordered.decide(_as_near(near), config.threshold)
        planted = signatures / "planted.parquet"
        words = _compared_words(planted, boilerplate)
        test = selftest.score(planted, config, self.queries.normalised, words, equal, dropped)
        selftest.check(config, test)
        dropped = dropped.filter(pc.less(dropped.column("key"), PLANTED))
        pq.write_table(dropped, to / "decisions.parquet", row_group_size=1 << 16)
        n_near = near.filter(pc.less(near.column("b"), PLANTED)).num_rows
        figures = {"candidates": int(histogram.sum()), "near": n_near, "histogram": histogram.tolist()}
        store.write_json(to / "figures.json", {**figures, "selftest": test.record()})

    def _complete(self, ordered: Ordered, near: pa.Table, shingles: Path, to: Path, histogram: Any) -> pa.Table:
        """Add the near pairs that ``near`` lacks, since not all documents of a large bucket were compared.

        Two kept documents are compared if a dropped one is near to both, until no such pair is near. So one document of
        a family of thousands is kept, as if all pairs had been compared.
        """
        compared: set[tuple[int, int]] = set()
        for number in range(_MAX_ROUNDS):
            a, b = ordered.uncompared(_as_near(near), _NEIGHBOURS_KEPT)
            pairs = [pair for pair in zip(a.tolist(), b.tolist(), strict=True) if pair not in compared]
            if not pairs:
                break
            compared.update(pairs)
            folder = to / f"round-{number}"
            (folder / "pairs").mkdir(parents=True)
            table = pa.table({"a": [pair[0] for pair in pairs], "b": [pair[1] for pair in pairs]}, _PAIRS)
            pq.write_table(table, folder / "pairs" / "pairs.parquet")
            self._compare(folder / "pairs", shingles, folder / "rows")
            new = self._near(folder / "rows", histogram)
            shutil.rmtree(folder)
            if not new.num_rows:
                break
            near = pa.concat_tables([near, new])
        return near

    def _near(self, compared: Path, histogram: Any) -> pa.Table:
        """Return the near pairs, sorted; adds all compared pairs of real documents to ``histogram``."""
        config = self.config
        tables = [_COMPARED.empty_table()]
        for pairs in _tables(compared):
            real = pairs.filter(pc.less(pairs.column("b"), PLANTED))
            histogram += np.histogram(_column(real, "jaccard"), _HISTOGRAM_BINS, (0, 1))[0]
            is_near = pc.greater_equal(pairs.column("jaccard"), config.threshold)
            if config.containment is not None:
                is_near = pc.or_(is_near, pc.greater_equal(pairs.column("containment"), config.containment))
            tables.append(pairs.filter(is_near).select(_COMPARED.names).cast(_COMPARED))
        return pa.concat_tables(tables).sort_by([("a", "ascending"), ("b", "ascending")])

    def _in_portions(self, what: str, tasks: list[Task], run: Callable[[list[Task]], None]) -> None:
        """Call ``run`` with as many tasks at a time as memory allows."""
        limit = self.config.memory_gb * 2**30 / 8
        portion: list[Task] = []
        size = done = 0
        total = sum(task.n_bytes for task in tasks)
        for task in tasks:
            if portion and size + task.n_bytes > limit:
                run(portion)
                done += size
                self.progress(what, done, total)
                portion = []
                size = 0
            portion.append(task)
            size += task.n_bytes
        if portion:
            run(portion)


def _compared_words(planted: Path, boilerplate: Path) -> dict[int, str]:
    """Return key -> the words compared instead of all words, for planted documents and their partners."""
    table = pq.read_table(planted, columns=["key", "partner"])
    keys = pa.array(np.concatenate([_column(table, "key"), _column(table, "partner")]), pa.int64())
    words: dict[int, str] = {}
    for rows in _tables(boilerplate / "compared"):
        chosen = rows.filter(pc.is_in(rows.column("key"), keys))
        words |= dict(zip(chosen.column("key").to_pylist(), chosen.column("words").to_pylist(), strict=True))
    return words


def _settings(config: DedupConfig, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _tables(folder: Path) -> Iterator[pa.Table]:
    """Yield the rows of a stage, one row group at a time."""
    for path in sorted(folder.glob("*.parquet")):
        try:
            with pq.ParquetFile(path) as file:
                yield from (file.read_row_group(group) for group in range(file.num_row_groups))
        except pa.ArrowException as error:
            raise DataError(f"{folder} cannot be read: {error}", hint="remove that folder and run again") from error


def _integers(folder: Path, columns: list[str]) -> pa.Table:
    """Return integer columns of a stage."""
    tables = [table.select(columns) for table in _tables(folder)]
    return pa.concat_tables([pa.schema([(name, pa.int64()) for name in columns]).empty_table(), *tables])


def _as_near(pairs: pa.Table) -> Near:
    return Near(*(_column(pairs, name) for name in _COMPARED.names))


def _column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.asarray(table.column(name))
