"""Scans spans of tokens for n-grams, in parallel with Daft: decodes, normalises and hashes a span at a time.

Memory: a span (a million tokens) for each thread, and the n-grams that were found, of each the first KEPT_DOCUMENTS
documents of a part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.base.errors import UserError
from smalti.data.prepare.contamination.ngrams import I64, U64, NgramSet, normalised
from smalti.data.prepare.daft_engine import Failures, choose_runner, daft_module
from smalti.data.prepare.dedup.columns import as_lists, pieces, rows_of_lists
from smalti.data.sources.source import Source
from smalti.data.tokenizer.encode import Tokenizer

KEPT_DOCUMENTS = 100
"""Documents that are kept of an n-gram in a part, the first ones: a common one is in millions."""
OVERLAP_TOKENS = 256
"""Tokens after the end of a span that are read too, for n-grams that begin in it: more than 13 words have."""

_SPAN_TOKENS = 1 << 20
PENDING_HITS = 4_000_000
_HITS = pa.struct(
    [("part", pa.int64()), ("n_tokens", pa.int64()), *((n, pa.large_list(pa.int64())) for n in ("hash", "document"))]
)


class Span(NamedTuple):
    """Tokens [begin, end) of a source; ``part`` is a number of the caller's."""

    part: int
    source: str
    begin: int
    end: int

    def split(self) -> "list[Span]":
        """Return the tasks of the scan."""
        starts = range(self.begin, self.end, _SPAN_TOKENS)
        return [self._replace(begin=begin, end=min(begin + _SPAN_TOKENS, self.end)) for begin in starts]


@dataclass
class Hits:
    """The n-grams that were found, with their documents: [hits] each, distinct."""

    hashes: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    documents: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def joined(cls, hits: "Sequence[Hits]") -> "Hits":
        """Return all hits, sorted and distinct, of each n-gram those in the first KEPT_DOCUMENTS documents."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in hits)])
        documents = np.concatenate([np.empty(0, np.int64), *(part.documents for part in hits)])
        order = np.lexsort((documents, hashes))
        hashes, documents = hashes[order], documents[order]
        new_hash = np.diff(hashes, prepend=hashes[:1] ^ np.uint64(1)) != 0
        distinct = new_hash | (np.diff(documents, prepend=-1) != 0)
        hashes, documents, new_hash = hashes[distinct], documents[distinct], new_hash[distinct]
        starts = np.flatnonzero(new_hash)
        rank = np.arange(len(hashes)) - np.repeat(starts, np.diff(starts, append=len(hashes)))
        return cls(hashes[rank < KEPT_DOCUMENTS], documents[rank < KEPT_DOCUMENTS])


@dataclass(frozen=True)
class Scanner:
    """Searches documents of sources for the n-grams of ``wanted``."""

    sources: Mapping[str, Source]
    tokenizer: Tokenizer
    wanted: NgramSet

    def hits(self, span: Span) -> Hits:
        """Search one span."""
        numbers, texts = self._documents(span)
        parts = []
        first = 0
        for part in pieces(texts):
            hashes, rows = self.wanted.find(normalised(part))
            parts.append(Hits(hashes, numbers[first + rows]))
            first += len(part)
        return Hits.joined(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Daft's local runner calls this object in threads; it pickles it only to test that it could

    def _documents(self, span: Span) -> tuple[I64, pa.Array]:
        """Return number and text of the documents in a span, with the words of the last one that go beyond it."""
        source = self.sources[span.source]
        n = span.end - span.begin
        ids = np.empty((1, min(n + OVERLAP_TOKENS, source.n_tokens - span.begin)), source.dtype)
        source.read_rows(np.array([span.begin]), ids)
        ids = ids[0]
        if source.eod_id is not None:
            ends = np.flatnonzero(ids == source.eod_id) + 1
            first = int(source.documents_at(np.array([span.begin]))[0])
        else:
            owners = source.documents_at(np.arange(span.begin, span.begin + len(ids)))
            ends = np.flatnonzero(np.diff(owners)) + 1
            first = int(owners[0])
        ends = np.append(ends, len(ids))
        ends = np.unique(ends[: np.searchsorted(ends, n) + 1])
        return first + np.arange(len(ends)), self._decoder.texts(ids, ends)

    @cached_property
    def _decoder(self) -> "_Decoder":
        return _Decoder(self.tokenizer)


class _Decoder:
    """Decodes many documents at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.bytes_of_ids()
        self._table = None if table is None else pa.array([*table, b""], pa.large_binary())

    def texts(self, ids: npt.NDArray[Any], ends: I64) -> pa.Array:
        """Return the texts of documents that end at ``ends`` in ``ids``."""
        starts = [0, *ends[:-1].tolist()]
        spans = zip(starts, ends.tolist(), strict=True)
        if self._table is None:
            return pa.array([self._tokenizer.decode(ids[a:b].tolist()) for a, b in spans], pa.large_string())
        joined = self._table.take(pa.array(np.minimum(ids.astype(np.int64), len(self._table) - 1)))
        _, offsets, data = joined.buffers()
        at = np.frombuffer(offsets, np.int64)
        view = memoryview(data)
        # A span may begin or end inside a character.
        return pa.array([str(view[at[a] : at[b]], "utf-8", "replace") for a, b in spans], pa.large_string())


def scan(scanner: Scanner, spans: Sequence[Span], failures: Path) -> Iterator[tuple[int, int, Hits]]:
    """Search ``spans`` in parallel; yields part, number of tokens and hits of each, in any order.

    ``failures``: a folder for errors of workers. Raises UserError for a source without document ends.
    """
    for name in {span.source for span in spans}:
        if scanner.sources[name].n_documents is None:
            raise UserError(
                f"source '{name}' ({scanner.sources[name].where}) does not record where its documents end",
                allowed="sources that do, such as token files of 'smalti data tokenize'",
            )
    choose_runner("native", None, "the contamination check")
    daft = daft_module("the contamination check")
    recorded = Failures(failures)

    def search(*columns: Any) -> pa.StructArray:
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        results = [(span, scanner.hits(span)) for span in (Span(*row) for row in rows)]
        lists = [
            as_lists([hits.hashes.view(np.int64) for _, hits in results]),
            as_lists([hits.documents for _, hits in results]),
        ]
        parts = pa.array([span.part for span, _ in results], pa.int64())
        sizes = pa.array([span.end - span.begin for span, _ in results], pa.int64())
        return pa.StructArray.from_arrays([parts, sizes, *lists], fields=list(_HITS))

    table = pa.table({name: [span[i] for span in spans] for i, name in enumerate(Span._fields)})
    function = daft.func.batch(return_dtype=daft.DataType.from_arrow_type(_HITS), use_process=False, batch_size=1)(
        recorded.recording(search)
    )
    frame = daft.from_arrow(table).select(function(*map(daft.col, Span._fields)).alias("hits"))
    frame = frame.select(daft.functions.unnest(daft.col("hits")))
    n_spans = 0
    with recorded.raised():
        for batch in frame.to_arrow_iter():
            n_spans += batch.num_rows
            hashes, documents = (rows_of_lists(batch.column(name)) for name in ("hash", "document"))
            numbers = zip(batch.column("part").to_pylist(), batch.column("n_tokens").to_pylist(), strict=True)
            for (part, n_tokens), values, owners in zip(numbers, hashes, documents, strict=True):
                yield part, n_tokens, Hits(values.view(np.uint64), owners)
    assert n_spans == len(spans), f"{n_spans} of {len(spans)} spans were scanned"
