"""Locates the documents of a source whose shards record where documents end."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from smalti.base.errors import UserError
from smalti.data.sources.source import Int64s

_CACHED_SHARDS = 64


class Documents:
    """The documents of a source, numbered from 0 through all shards in their order. Thread-safe."""

    def __init__(self, shard_documents: Int64s, shard_tokens: Int64s, ends_of: Callable[[int], Int64s]) -> None:
        """``ends_of(shard)`` returns where its documents end, in its tokens; called on demand, and cached."""
        self._first = np.concatenate([[0], np.cumsum(shard_documents)]).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(shard_tokens)]).astype(np.int64)
        self._ends_of = ends_of
        self._cached_ends: OrderedDict[int, Int64s] = OrderedDict()
        self._lock = threading.Lock()
        self.n_documents = int(self._first[-1])

    def at(self, tokens: Int64s) -> Int64s:
        """Return the number of the document of each token [n]; the tokens must exist."""
        out = np.empty(tokens.shape, dtype=np.int64)
        shards = np.searchsorted(self._starts, tokens, side="right") - 1
        for shard in np.unique(shards).tolist():
            mask = shards == shard
            inside = tokens[mask] - self._starts[shard]
            out[mask] = self._first[shard] + np.searchsorted(self.ends(shard), inside, side="right")
        return out

    def span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a document. UserError if there is no such document."""
        if not 0 <= document < self.n_documents:
            raise UserError(f"there is no document {document:,}", allowed=f"0 to {self.n_documents - 1:,}")
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        ends = self.ends(shard)
        index = document - int(self._first[shard])
        start = int(self._starts[shard])
        return start + (int(ends[index - 1]) if index else 0), start + int(ends[index])

    def ends(self, shard: int) -> Int64s:
        """Return where the documents of a shard end, in its tokens."""
        with self._lock:
            if shard in self._cached_ends:
                self._cached_ends.move_to_end(shard)
                return self._cached_ends[shard]
        ends = self._ends_of(shard)
        with self._lock:
            self._cached_ends[shard] = ends
            while len(self._cached_ends) > _CACHED_SHARDS:
                self._cached_ends.popitem(last=False)
        return ends
