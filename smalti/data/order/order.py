"""The order of training as arithmetic: position -> (source, epoch, sequence), and back.

Each epoch of each source is shuffled by its own keyed permutation: nothing is stored, no index is built. The order is
the same on every machine and depends only on the seed, the names of the sources, their numbers of sequences and the
schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.config.data import ShuffleConfig
from smalti.data.order.permutation import Permutation
from smalti.data.order.schedule import Schedule
from smalti.data.order.tables import Int64s
from smalti.data.order.window import WindowPermutation

_CACHED_PERMUTATIONS = 256


@dataclass(frozen=True)
class Restart:
    """A source whose order restarts with a segment although its last epoch was not read completely."""

    segment: int
    source: int
    epoch: int
    """The first epoch of the segment."""
    read: int
    """Sequences read of the previous epoch, at the seq_len of the previous segment: they may be read again."""
    size: int
    """Sequences in the whole previous epoch."""


class Order:
    """Maps positions to (source, epoch, sequence), and back. Stores nothing larger than a table of the schedule.

    Each epoch of each source has its own order. A new segment begins the next epoch of every source that was read
    before, with as many sequences as the source has at the segment's seq_len.
    """

    def __init__(
        self, schedule: Schedule, sizes: Sequence[Mapping[str, int]], seed: int, shuffle: ShuffleConfig | None = None
    ) -> None:
        """``sizes``: for each segment, sequences in one epoch of each source."""
        assert len(sizes) == len(schedule.segments), "sizes and schedule have different segments"
        for segment_sizes in sizes:
            assert set(segment_sizes) == set(schedule.sources), "sizes and schedule name different sources"
            for name, size in segment_sizes.items():
                if size < 1:
                    raise UserError(f"source '{name}' cannot have {size} sequences", allowed="1 or more")
        self.schedule = schedule
        self.seed = seed
        self.shuffle = shuffle or ShuffleConfig()
        self.sizes = tuple(tuple(segment_sizes[name] for name in schedule.sources) for segment_sizes in sizes)
        """[segments][sources] sequences in an epoch."""
        self._sizes = np.array(self.sizes, dtype=np.int64)
        self._first_epochs = np.zeros_like(self._sizes)
        for segment in range(1, len(sizes)):
            read = self._ordinals_read(segment - 1)
            self._first_epochs[segment] = self._first_epochs[segment - 1] + -(-read // self._sizes[segment - 1])
        # Computing the keys of a permutation takes 0.1 ms, as long as shuffling a thousand positions.
        self.permutation = lru_cache(maxsize=_CACHED_PERMUTATIONS)(self._permutation)

    def locate(self, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int16], Int64s, Int64s]:
        """Return source index [n], epoch [n] and sequence [n], at the segment's seq_len, of positions [n]."""
        source, ordinal, segment = self.schedule.locate(positions)
        epochs_passed, index = np.divmod(ordinal, self._sizes[segment, source])
        epoch = self._first_epochs[segment, source] + epochs_passed
        sequence = np.empty_like(index)
        # A batch has one or two epochs of each source; more only if a source is tiny.
        pairs = epoch * len(self.schedule.sources) + source
        by_pair = np.argsort(pairs, axis=None, kind="stable")
        ordered = pairs.ravel()[by_pair]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        for group in np.split(by_pair, cuts) if ordered.size else ():
            pair_epoch, pair_source = divmod(int(pairs.flat[group[0]]), len(self.schedule.sources))
            sequence.flat[group] = self.permutation(pair_source, pair_epoch)(index.flat[group])
        return source, epoch, sequence

    def position_of(self, source: int, epoch: int, sequences: npt.ArrayLike) -> Int64s:
        """Return the positions of sequences [n] of one epoch of one source. UserError if the run never reads them."""
        segment = self.segment_of(source, epoch)
        index = self.permutation(source, epoch).inverse(sequences)
        epochs_passed = epoch - int(self._first_epochs[segment, source])
        return self.schedule.position_of(source, segment, index + epochs_passed * self.sizes[segment][source])

    def epochs_begun(self, step: int) -> Int64s:
        """Return the number of epochs of each source that the steps before ``step`` began [sources]."""
        segment = self.schedule.segment(max(step - 1, 0))
        read = self.schedule.ordinals_end(step, segment)
        begun: Int64s = self._first_epochs[segment] + -(-read // self._sizes[segment])
        return begun

    def restarts(self) -> list[Restart]:
        """Return the sources whose order restarts at a change of seq_len with unread sequences in the last epoch."""
        restarts = []
        for segment in range(1, len(self.sizes)):
            read = self._ordinals_read(segment - 1)
            used = self.schedule.counts(self.schedule.total_steps, segment)
            for source, size in enumerate(self.sizes[segment - 1]):
                if read[source] % size and used[source]:
                    epoch = int(self._first_epochs[segment, source])
                    restarts.append(Restart(segment, source, epoch, int(read[source]) % size, size))
        return restarts

    def segment_of(self, source: int, epoch: int) -> int:
        """Return the segment of an epoch of a source."""
        return int(np.searchsorted(self._first_epochs[:, source], epoch, side="right")) - 1

    def _ordinals_read(self, segment: int) -> Int64s:
        """Return the number of ordinals in a whole segment, including skipped ones [sources]."""
        return self.schedule.ordinals_end(self.schedule.timeline.segment_end(segment), segment)

    def _permutation(self, source: int, epoch: int) -> Permutation | WindowPermutation:
        """Return the shuffle of one epoch of one source."""
        key = derive_key("order", self.seed, self.schedule.sources[source], epoch)
        segment = self.segment_of(source, epoch)
        size = self.sizes[segment][source]
        if self.shuffle.mode == "full":
            return Permutation(size, key)
        chunk = max(1, self.shuffle.chunk_tokens // self.schedule.segments[segment].seq_len)
        return WindowPermutation(size, key, chunk=chunk, window_chunks=self.shuffle.window_chunks)
