"""The Daft queries of a deduplication: from tasks to Parquet folders, on this machine or on a cluster.

Both runners give the same rows; their order and their files may differ, so readers sort. Texts never come to the
driver. All workers need the same file system. The words of a text are compared (``words``), without the boilerplate of
some documents (``boilerplate``).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smalti.data.prepare.daft_engine import daft_module
from smalti.data.prepare.dedup.boilerplate import crowd_size, in_buckets, seem_repetitive, to_compare
from smalti.data.prepare.dedup.buckets import PLANTED, pairs_in_buckets
from smalti.data.prepare.dedup.columns import NONE, as_lists, bools, pieces, rows_of, rows_of_lists
from smalti.data.prepare.dedup.corpus import TASK_SCHEMA, TEXT_SCHEMA, Task, read_task
from smalti.data.prepare.dedup.frames import Frames, exploded, n_rows_of
from smalti.data.prepare.dedup.licence import without_licences
from smalti.data.prepare.dedup.minhash import band_name, hashes_of_bands, signature_of
from smalti.data.prepare.dedup.shingles import HASHES, MAX_ROWS, shared, shingle_sets, similarities
from smalti.data.prepare.dedup.words import words_of

_PAIR = pa.struct([("a", pa.int64()), ("b", pa.int64())])


class Queries(Frames):
    """The queries of a deduplication with one config."""

    def signatures(self, tasks: Sequence[Task], folder: Path) -> None:
        """Write key, id, source, heldout, score, has_words, digests, order, place and bands of each document."""
        daft = daft_module()
        col, functions = daft.col, daft.functions
        n_bands, n_rows = self.config.bands, self.config.rows
        names = ["digest_0", "digest_1", "repetitive", "order", "place", *map(band_name, range(n_bands))]
        fields = [pa.field(name, pa.int64()) for name in names]
        width = self.config.shingle_words

        def cut(words: Any, signatures: Any, heldout: Any, *digests: Any) -> pa.StructArray:
            # Daft's cast of a hash to int64 makes half of them null; a view keeps the bits.
            hashes = [np.asarray(digest.to_arrow()) for digest in digests]
            values = np.asarray(signatures.to_arrow().flatten()).reshape(len(hashes[0]), n_bands * n_rows)
            # Held-out documents come first (a set sign bit is a negative number); then the same order in all buckets.
            place = (hashes[0] >> np.uint64(1)) | (bools(heldout).astype(np.uint64) << np.uint64(63))
            repetitive = seem_repetitive(values, words.to_arrow(), width).astype(np.uint64)
            order, *bands = hashes_of_bands(values, n_bands, n_rows)
            columns = [*hashes, repetitive, order, place, *bands]
            return pa.StructArray.from_arrays([pa.array(column.view(np.int64)) for column in columns], fields=fields)

        frame = self._texts(tasks)
        # Texts without words are equal only if all their characters are.
        whole = functions.when(col("words") == "", col("text")).otherwise(col("words"))
        digests = [functions.hash(whole, seed=seed) for seed in (0, 1)]
        frame = frame.select(
            *(col(name) for name in ("key", "id", "source", "heldout", "score")),
            (col("words") != "").alias("has_words"),
            self._function(cut, pa.struct(fields))(
                col("words"), signature_of(col("words"), self.config, functions), col("heldout"), *digests
            ).alias("numbers"),
        )
        names = [name for name in frame.column_names if name != "numbers"]
        self._write(frame.select(*map(col, names), functions.unnest(col("numbers"))), folder)

    def equal(self, signatures: Path, folder: Path) -> None:
        """Write (key, node) for each document that shares its words with others.

        The node is one of these documents, a held-out one if there is one.
        """
        daft = daft_module()
        col = daft.col
        offset = 2 * PLANTED  # subtracted from the key, it sorts held-out documents first
        rank = daft.functions.when(col("heldout"), col("key") - offset).otherwise(col("key"))
        rows = self._read(signatures).select(col("key"), col("digest_0"), col("digest_1"), rank.alias("rank"))
        same = daft.Window().partition_by("digest_0", "digest_1")
        rows = rows.with_column("first", col("rank").min().over(same))
        node = daft.functions.when(col("first") < 0, col("first") + offset).otherwise(col("first"))
        rows = rows.with_column("node", node)
        rows = rows.with_column("n_equal", col("key").count().over(same)).where(col("n_equal") > 1)
        self._write(rows.select(col("key"), col("node")), folder)

    def candidates(
        self, signatures: Path, boilerplate: Path, bands: Sequence[int], part: tuple[int, int], to: Path
    ) -> None:
        """Write the pairs (a, b) that share a bucket of one of ``bands``; ``part`` = (i, n) takes the i-th of n shards.

        Of documents with equal words only the node is used. Pairs are distinct within one call.
        """
        daft = daft_module()
        col, functions = daft.col, daft.functions
        most = self.config.bucket_documents
        reach = self.config.bucket_neighbours

        def propose(*columns: Any) -> pa.Array:
            rows = [rows_of(column) for column in columns]
            shards = zip(*rows, strict=True)
            pairs = [pairs_in_buckets(*shard, bucket_documents=most, bucket_neighbours=reach) for shard in shards]
            offsets = np.cumsum([0, *(len(left) for left, _ in pairs)])
            sides = [np.concatenate([NONE, *(pair[side] for pair in pairs)]) for side in (0, 1)]
            flat = pa.StructArray.from_arrays([pa.array(side) for side in sides], fields=list(_PAIR))
            return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), flat)

        frame = self._buckets(self._nodes(signatures, boilerplate), bands, part, _BUCKET)
        pairs = self._function(propose, pa.large_list(_PAIR), batch_size=1)(*map(col, _BUCKET))
        frame = exploded(frame.select(pairs.alias("pair")))
        self._write(frame.select(functions.unnest(col("pair"))).distinct(), to)

    def count_pairs(self, signatures: Path, boilerplate: Path, band: int) -> int:
        """Estimate the number of pairs that ``candidates`` proposes in a band."""
        daft = daft_module()
        col = daft.col
        most = self.config.bucket_documents
        reach = self.config.bucket_neighbours
        sizes = self._nodes(signatures, boilerplate).groupby(band_name(band)).agg(col("key").count().alias("n"))
        sizes = sizes.where(col("n") > 1).groupby("n").agg(col("n").count().alias("buckets"))
        with self.failures.raised():
            rows = sizes.to_pylist()
        pairs_of = {
            row["n"]: row["n"] * (row["n"] - 1) // 2 if row["n"] <= most else 2 * reach * row["n"] for row in rows
        }
        return sum(pairs_of[row["n"]] * row["buckets"] for row in rows)

    def crowds(self, signatures: Path, equal: Path, bands: Sequence[int], part: tuple[int, int], to: Path) -> None:
        """Write (key, crowd) of documents that share a bucket of ``bands``; ``crowd``: whether the bucket is large.

        Rows may be repeated; ``part`` as in ``candidates``.
        """
        col = daft_module().col
        assert self.config.boilerplate_documents is not None
        least = crowd_size(self.config.boilerplate_documents)
        row = pa.struct([("key", pa.int64()), ("crowd", pa.bool_())])

        def crowd(*columns: Any) -> pa.Array:
            shards = zip(*(rows_of(column) for column in columns), strict=True)
            results = [in_buckets(hashes, keys, least) for hashes, keys in shards]
            offsets = np.cumsum([0, *(len(keys) for keys, _ in results)])
            sides = [pa.array(np.concatenate([NONE, *(result[i] for result in results)])) for i in (0, 1)]
            sides[1] = sides[1].cast(pa.bool_())
            rows = pa.StructArray.from_arrays(sides, fields=list(row))
            return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), rows)

        rows = self._read(signatures).where(col("has_words")).join(self._copies(equal), on="key", how="anti")
        frame = self._buckets(rows, bands, part, ("hash", "key"))
        members = self._function(crowd, pa.large_list(row), batch_size=1)(col("hash"), col("key"))
        self._write(exploded(frame.select(members.alias("row"))).select(daft_module().functions.unnest(col("row"))), to)

    def repetitive(self, signatures: Path, to: Path) -> None:
        """Write (key, crowd) for documents that may be repetitive."""
        daft = daft_module()
        rows = self._read(signatures).where(daft.col("has_words") & (daft.col("repetitive") == 1))
        self._write(rows.select(daft.col("key"), daft.lit(False).alias("crowd")), to)

    def words(self, tasks: Sequence[Task], folder: Path) -> None:
        """Write (key, words) of the documents of ``tasks``."""
        col = daft_module().col
        self._write(self._texts(tasks).select(col("key"), col("words")), folder)

    def common(self, words: Path, crowd: pa.Table, part: tuple[int, int]) -> Any:
        """Return the sorted hashes of shingles that ``boilerplate_documents`` of the documents in ``crowd`` (key) have.

        ``part`` = (i, n) counts the i-th of n ranges of hashes.
        """
        daft = daft_module()
        col = daft.col
        width = self.config.shingle_words
        low, high = (HASHES * number // part[1] for number in (part[0], part[0] + 1))

        def shingle(words: Any) -> pa.Array:
            sets = [shingle_sets(piece, width) for piece in pieces(words.to_arrow().cast(pa.large_string()))]
            rows = [np.asarray(row) for lists in sets for row in rows_of_lists(lists)]
            return as_lists([row[(row >= low) & (row < high)] for row in rows])

        rows = self._read(words).join(daft.from_arrow(crowd), on="key", how="semi")
        sets = self._function(shingle, pa.large_list(pa.int64()))(col("words"))
        rows = exploded(rows.select(sets.alias("shingle")))
        counts = rows.groupby("shingle").agg(daft.functions.count(col("shingle")).alias("n"))
        with self.failures.raised():
            common = counts.where(col("n") >= self.config.boilerplate_documents).select(col("shingle")).to_arrow()
        return np.sort(np.asarray(common.column("shingle")))

    def compared(self, words: Path, repetitive: Path, common: Path, max_core_frac: float, to: Path) -> None:
        """Write (key, words, order, bands) of the documents in ``words`` of which not all words are compared.

        The column ``words`` has the words that are compared, or "" for a document that is compared with no other.
        """
        daft = daft_module()
        col = daft.col
        n_bands = self.config.bands
        n_rows = self.config.rows
        width = self.config.shingle_words
        fields = [pa.field(name, pa.int64()) for name in ("order", *map(band_name, range(n_bands)))]

        def instead(words: Any, seems: Any) -> pa.Array:
            shingles = np.load(common, mmap_mode="r")
            texts = pieces(words.to_arrow().cast(pa.large_string()))
            flags = bools(seems)
            starts = np.cumsum([0, *map(len, texts)])
            replacements = [
                text
                for piece, start in zip(texts, starts.tolist(), strict=False)
                for text in to_compare(piece, flags[start : start + len(piece)], shingles, width, max_core_frac)
            ]
            return pa.array(replacements, pa.large_string())

        def cut(signatures: Any) -> pa.StructArray:
            values = np.asarray(signatures.to_arrow().flatten()).reshape(-1, n_bands * n_rows)
            columns = [pa.array(column.view(np.int64)) for column in hashes_of_bands(values, n_bands, n_rows)]
            return pa.StructArray.from_arrays(columns, fields=fields)

        seems = self._read(repetitive).select(col("key"), daft.lit(True).alias("seems"))
        frame = self._read(words).join(seems, on="key", how="left")
        frame = frame.with_column("seems", daft.functions.fill_null(col("seems"), False))
        compared_words = self._function(instead, pa.large_string())(col("words"), col("seems"))
        frame = frame.select(col("key"), compared_words.alias("words"))
        frame = frame.where(daft.functions.not_null(col("words")))
        signatures = signature_of(col("words"), self.config, daft.functions)
        numbers = self._function(cut, pa.struct(fields))(signatures).alias("numbers")
        frame = frame.select(col("key"), col("words"), numbers)
        self._write(frame.select(col("key"), col("words"), daft.functions.unnest(col("numbers"))), to)

    def shingles(self, tasks: Sequence[Task], folder: Path) -> None:
        """Write (key, shingles) of the documents of ``tasks``."""
        self._shingles(self._texts(tasks), folder)

    def shingles_of(self, words: Path, compared: Path, folder: Path) -> None:
        """Write (key, shingles) of the documents in ``words``; those in ``compared`` by their words there."""
        key = daft_module().col("key")
        rows = self._read(words).select(key, daft_module().col("words"))
        if n_rows_of(compared):
            new = self._read(compared).select(key, daft_module().col("words"))
            rows = rows.join(new.select(key), on="key", how="anti").concat(new)
        self._shingles(rows, folder)

    def _shingles(self, frame: Any, folder: Path) -> None:
        col = daft_module().col
        width = self.config.shingle_words

        def shingle(words: Any) -> pa.Array:
            texts = words.to_arrow().cast(pa.large_string())
            return pa.concat_arrays([shingle_sets(piece, width) for piece in pieces(texts)])  # at least one piece

        sets = self._function(shingle, pa.large_list(pa.int64()))(col("words"))
        self._write(frame.select(col("key"), sets.alias("shingles")), folder)

    def compare(self, pairs: Path, shingles: Path, part: tuple[int, int], to: Path) -> None:
        """Write (a, b, jaccard, containment) of every pair; ``part`` = (i, n) takes the i-th of n parts."""
        daft = daft_module()
        col, functions = daft.col, daft.functions
        row = pa.struct([("jaccard", pa.float64()), ("containment", pa.float64())])

        def compare(set_a: Any, set_b: Any) -> pa.StructArray:
            first, second = (column.to_arrow().cast(pa.large_list(pa.int64())) for column in (set_a, set_b))
            values = [
                similarities(*shared(first.slice(start, MAX_ROWS), second.slice(start, MAX_ROWS)))
                for start in range(0, len(first), MAX_ROWS)
            ]
            columns = [np.concatenate([pair[i] for pair in values]) if values else np.empty(0) for i in (0, 1)]
            return pa.StructArray.from_arrays([pa.array(column) for column in columns], fields=list(row))

        number, n_parts = part
        frame = self._read(pairs)
        if n_parts > 1:
            frame = frame.where(functions.pmod(col("a"), n_parts) == number)
        sets = self._read(shingles)
        for side in ("a", "b"):
            renamed = sets.select(col("key").alias(side), col("shingles").alias(f"set_{side}"))
            frame = frame.join(renamed, on=side)
        values = self._function(compare, row)(col("set_a"), col("set_b"))
        frame = frame.select(col("a"), col("b"), values.alias("values"))
        self._write(frame.select(col("a"), col("b"), functions.unnest(col("values"))), to)

    def distinct(self, folders: Path, to: Path) -> None:
        """Write the distinct pairs of several folders."""
        daft = daft_module()
        self._write(self._read(folders, "*/*.parquet").select(daft.col("a"), daft.col("b")).distinct(), to)

    def about(self, signatures: Path, keys: pa.Table) -> pa.Table:
        """Return key, id, source, heldout, score and digests of the documents with these keys, in any order."""
        daft = daft_module()
        names = ("key", "id", "source", "heldout", "score", "digest_0", "digest_1")
        rows = self._read(signatures).select(*(daft.col(name) for name in names))
        with self.failures.raised():
            return rows.join(daft.from_arrow(keys), on="key", how="semi").to_arrow()

    def normalised(self, texts: Sequence[str]) -> pa.Array:
        """Return the words of each text, joined by single blanks, as in the other queries; for a few texts."""
        daft = daft_module()
        table = pa.table({"number": pa.array(range(len(texts))), "text": pa.array(texts, pa.large_string())})
        frame = daft.from_arrow(table).select(daft.col("number"), self._words(daft.col("text")).alias("words"))
        with self.failures.raised():
            table = frame.to_arrow().sort_by("number")
        return table.column("words").combine_chunks().cast(pa.large_string())

    def map_tasks(self, function: Callable[..., str], tasks: pa.Table) -> list[str]:
        """Call ``function`` in workers for every row of ``tasks`` (columns as arguments); results come in any order."""
        daft = daft_module()

        def call(*columns: Any) -> pa.Array:
            rows = zip(*(column.to_arrow().to_pylist() for column in columns), strict=True)
            return pa.array([function(*row) for row in rows], pa.large_string())

        result = self._function(call, pa.large_string(), batch_size=1)(*map(daft.col, tasks.column_names))
        with self.failures.raised():
            results = self._tasks(tasks).select(result.alias("result")).to_arrow()
        return list(results.column("result").to_pylist())

    def _texts(self, tasks: Sequence[Task]) -> Any:
        """Return a frame of TEXT_SCHEMA with the documents of the tasks, and the column ``words`` (normalised text)."""
        daft = daft_module()
        col, functions = daft.col, daft.functions
        score = self.config.score_field
        row = pa.struct(list(TEXT_SCHEMA))

        def read(*columns: Any) -> pa.Array:
            rows = zip(*(column.to_arrow().to_pylist() for column in columns), strict=True)
            batches = [read_task(Task(*values), score) for values in rows]
            flat = pa.concat_arrays([pa.array([], row), *(batch.to_struct_array() for batch in batches)])
            offsets = np.cumsum([0, *(batch.num_rows for batch in batches)])
            return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), flat)

        table = pa.Table.from_pylist([vars(task) for task in tasks], schema=TASK_SCHEMA)
        frame = self._tasks(table)
        rows = self._function(read, pa.large_list(row), batch_size=1)(*map(col, TASK_SCHEMA.names))
        frame = exploded(frame.select(rows.alias("row")))
        frame = frame.select(functions.unnest(col("row")))
        return frame.with_column("words", self._words(col("text")))

    def _words(self, text: Any) -> Any:
        def strip(texts: Any) -> pa.Array:
            return without_licences(texts.to_arrow().cast(pa.large_string()))

        return words_of(self._function(strip, pa.large_string())(text), daft_module().functions)

    def _copies(self, equal: Path) -> Any:
        col = daft_module().col
        return self._read(equal).where(col("key") != col("node")).select(col("key"))

    def _nodes(self, signatures: Path, boilerplate: Path) -> Any:
        """Return key, order, place and bands of documents with words; of documents with equal words only the node."""
        col = daft_module().col
        bands = [col(band_name(band)) for band in range(self.config.bands)]
        rows = self._read(signatures).where(col("has_words"))
        rows = rows.join(self._copies(boilerplate / "equal"), on="key", how="anti")
        whole = rows.select(col("key"), col("order"), col("place"), *bands)
        if not n_rows_of(boilerplate / "compared"):
            return whole
        compared = self._read(boilerplate / "compared")
        new = compared.where(col("words") != "").select(col("key"), col("order"), *bands)
        new = new.join(rows.select(col("key"), col("place")), on="key")
        whole = whole.join(compared.select(col("key")), on="key", how="anti")
        return whole.concat(new.select(col("key"), col("order"), col("place"), *bands))

    def _buckets(self, rows: Any, bands: Sequence[int], part: tuple[int, int], names: Sequence[str]) -> Any:
        """Return a frame with a row of lists (the columns ``names``) for each shard of the hashes of ``bands``."""
        daft = daft_module()
        col, functions = daft.col, daft.functions
        number, n_parts = part
        frame = None
        for band in bands:
            hashes = rows.select(*(col(name) for name in names if name != "hash"), col(band_name(band)).alias("hash"))
            hashes = hashes.with_column("shard", functions.pmod(col("hash"), n_parts * _SHARDS))
            hashes = hashes.where(functions.pmod(col("shard"), n_parts) == number)
            frame = hashes if frame is None else frame.concat(hashes)
        assert frame is not None
        return frame.groupby("shard").agg(*(functions.list_agg(col(name)).alias(name) for name in names))


_BUCKET = ("hash", "key", "order", "place")
_SHARDS = 16
