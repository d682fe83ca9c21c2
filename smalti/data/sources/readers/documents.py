"""Documents of a source whose shards keep them apart: which one a token belongs to, and where one lies."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from smalti.base.errors import UserError
from smalti.data.sources.source import Int64s

_KEPT_SHARDS = 64


class Documents:
    """Numbered through all shards, in their order. Threads may share it."""

    def __init__(self, shard_documents: Int64s, shard_tokens: Int64s, ends_of: Callable[[int], Int64s]) -> None:
        """``ends_of(shard)``: where its documents end, counted in its tokens; asked when needed, some answers kept."""
        self._first = np.concatenate([[0], np.cumsum(shard_documents)]).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(shard_tokens)]).astype(np.int64)
        self._ends_of = ends_of
        self._kept: OrderedDict[int, Int64s] = OrderedDict()
        self._lock = threading.Lock()
        self.n_documents = int(self._first[-1])

    def at(self, tokens: Int64s) -> Int64s:
        """Number of the document of each token [n]; tokens must exist."""
        out = np.empty(tokens.shape, dtype=np.int64)
        shards = np.searchsorted(self._starts, tokens, side="right") - 1
        for shard in np.unique(shards).tolist():
            mask = shards == shard
            inside = tokens[mask] - self._starts[shard]
            out[mask] = self._first[shard] + np.searchsorted(self.ends(shard), inside, side="right")
        return out

    def span(self, document: int) -> tuple[int, int]:
        """Tokens [begin, end) of a document."""
        if not 0 <= document < self.n_documents:
            raise UserError(f"document {document:,}", allowed=f"0 to {self.n_documents - 1:,}")
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        ends, index, start = self.ends(shard), document - int(self._first[shard]), int(self._starts[shard])
        return start + (int(ends[index - 1]) if index else 0), start + int(ends[index])

    def ends(self, shard: int) -> Int64s:
        """Where the documents of a shard end, in its tokens."""
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        ends = self._ends_of(shard)
        with self._lock:
            self._kept[shard] = ends
            while len(self._kept) > _KEPT_SHARDS:
                self._kept.popitem(last=False)
        return ends
