"""A shuffle for disks that seek slowly: permutes chunks of neighbouring sequences, and sequences in windows of chunks.

An epoch visits the chunks in the order of one permutation; ``window_chunks`` consecutive ones are a *window*, whose
sequences are permuted among themselves. So the disk seeks once per chunk. It mixes less than ``Permutation``: two
sequences of a chunk are less than two windows apart, so a source sorted on disk stays partly sorted.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from smalti.base.rng import derive_key
from smalti.data.order.permutation import Permutation
from smalti.data.order.tables import Int64s, check_indices

_CACHED_WINDOWS = 16


class WindowPermutation:
    """A keyed bijection of 0 .. size-1 that keeps neighbours together, computed for any indices without a table."""

    def __init__(self, size: int, key: int, *, chunk: int, window_chunks: int) -> None:
        """``chunk``: sequences in a chunk; the last chunk may be shorter. The last window has up to twice as many
        chunks as the others, so that none is left over."""
        assert size >= 1 and chunk >= 1 and window_chunks >= 1
        self.size = size
        self.key = key
        self.chunk = chunk
        self.window_chunks = window_chunks
        n_chunks = -(-size // chunk)
        self.n_windows = max(1, n_chunks // window_chunks)
        self._chunks = Permutation(n_chunks, derive_key("chunks", key))
        # the place of the short chunk in the order of chunks, and the number of sequences that it lacks
        self._short_at = int(self._chunks.inverse(np.array([n_chunks - 1]))[0])
        self._short_by = n_chunks * chunk - size
        self._window_permutation = lru_cache(maxsize=_CACHED_WINDOWS)(self._permutation_of_window)

    def __call__(self, indices: npt.ArrayLike) -> Int64s:
        """Map indices [n] to their images, int64 [n]."""
        visit_index = self._shuffled(check_indices(indices, self.size), forward=True)
        # after the short chunk, count as if it had the full length
        after_short = visit_index >= (self._short_at + 1) * self.chunk - self._short_by
        place, within = np.divmod(visit_index + self._short_by * after_short, self.chunk)
        return np.asarray(self._chunks(place) * self.chunk + within, dtype=np.int64)

    def inverse(self, indices: npt.ArrayLike) -> Int64s:
        """Map images [n] back to their indices, int64 [n]."""
        chunk, within = np.divmod(check_indices(indices, self.size), self.chunk)
        place = self._chunks.inverse(chunk)
        visit_index = place * self.chunk + within - self._short_by * (place > self._short_at)
        return self._shuffled(np.asarray(visit_index, dtype=np.int64), forward=False)

    def _shuffled(self, visit_index: Int64s, *, forward: bool) -> Int64s:
        """Apply each window's permutation, or its inverse; indices are in the order in which the chunks are visited."""
        flat = visit_index.ravel()
        out = np.empty_like(flat)
        whole = np.where(flat >= self._begin_of(self._short_at + 1), flat + self._short_by, flat)
        window_of = np.minimum(whole // (self.chunk * self.window_chunks), self.n_windows - 1)
        for window in sorted(set(window_of.ravel().tolist())):
            mask = window_of == window
            begin, permutation = self._window_permutation(window)
            inside = flat[mask] - begin
            out[mask] = begin + (permutation(inside) if forward else permutation.inverse(inside))
        return out.reshape(visit_index.shape)

    def _begin_of(self, place: int) -> int:
        """Return the first index of the chunk that is visited ``place``-th."""
        return min(place * self.chunk - (self._short_by if place > self._short_at else 0), self.size)

    def _permutation_of_window(self, window: int) -> tuple[int, Permutation]:
        """Return the first index of a window and the permutation of its sequences."""
        begin = self._begin_of(window * self.window_chunks)
        last = window == self.n_windows - 1
        end = self.size if last else self._begin_of((window + 1) * self.window_chunks)
        return begin, Permutation(end - begin, derive_key("window", self.key, window))
