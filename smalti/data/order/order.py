"""The order of training as arithmetic: position -> (source, epoch, sequence), and back.

Each epoch of each source is shuffled by a keyed permutation of its own, so there is no epoch array, no index to build
and nothing to store. Promises: a bijection for every size from 1 to 2**62, the same on every machine; the order
depends on seed, names of the sources, their numbers of sequences and the schedule, and on nothing else. Does not
promise secrecy: the cipher is made to shuffle, not to hide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.config.data import ShuffleConfig
from smalti.data.order.mixture_schedule import Schedule
from smalti.data.order.permutation import MAX_SIZE, Permutation
from smalti.data.order.tables import Int64s
from smalti.data.order.window import WindowPermutation

__all__ = ["MAX_SIZE", "Order", "Permutation", "Restart"]

_KEPT_PERMUTATIONS = 256


@dataclass(frozen=True)
class Restart:
    """A source whose order begins anew in an era before its last epoch was read to the end."""

    era: int
    source: int
    epoch: int
    """The first epoch of the era; those before it are over."""
    read: int
    """Sequences of the epoch before that were read, in the sequence length of the era before: they may come again."""
    size: int
    """Sequences of a whole epoch before."""


class Order:
    """Position of training -> (source, epoch, sequence). Holds no array longer than a table of the schedule.

    Each epoch of each source has an order of its own. A new era begins the next epoch of every source that was read
    before, with as many sequences as the source has at the era's seq_len.
    """

    def __init__(
        self, schedule: Schedule, sizes: Sequence[Mapping[str, int]], seed: int, shuffle: ShuffleConfig | None = None
    ) -> None:
        """``sizes``: for each era, sequences in one epoch of each source."""
        assert len(sizes) == len(schedule.eras), "sizes and schedule have other eras"
        for of_era in sizes:
            assert set(of_era) == set(schedule.sources), "sizes and schedule name other sources"
            for name, size in of_era.items():
                if size < 1:
                    raise UserError(f"source '{name}' has {size} sequences", allowed="1 or more")
        self.schedule, self.seed, self.shuffle = schedule, seed, shuffle or ShuffleConfig()
        self.sizes = tuple(tuple(of_era[name] for name in schedule.sources) for of_era in sizes)
        """[eras][sources]"""
        self._sizes = np.array(self.sizes, dtype=np.int64)
        self._first_epochs = np.zeros_like(self._sizes)
        for era in range(1, len(sizes)):
            read = schedule.ordinals_end(schedule.eras[era].start_step, era - 1)
            self._first_epochs[era] = self._first_epochs[era - 1] + -(-read // self._sizes[era - 1])
        # the keys of a permutation cost 0.1 ms, as much as shuffling a thousand positions
        self.permutation = lru_cache(maxsize=_KEPT_PERMUTATIONS)(self._permutation)

    def locate(self, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int16], Int64s, Int64s]:
        """Positions [n] -> source index [n], epoch [n], sequence within the source [n], in the seq_len of its era."""
        source, ordinal, era = self.schedule.locate(positions)
        passed, index = np.divmod(ordinal, self._sizes[era, source])
        epoch = self._first_epochs[era, source] + passed
        sequence = np.empty_like(index)
        # a batch meets one or two epochs of each source, many only where a source is tiny
        pairs = epoch * len(self.schedule.sources) + source
        by_pair = np.argsort(pairs, axis=None, kind="stable")
        ordered = pairs.ravel()[by_pair]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        for here in np.split(by_pair, cuts) if ordered.size else ():
            number, which = divmod(int(pairs.flat[here[0]]), len(self.schedule.sources))
            sequence.flat[here] = self.permutation(which, number)(index.flat[here])
        return source, epoch, sequence

    def position_of(self, source: int, epoch: int, sequences: npt.ArrayLike) -> Int64s:
        """Where sequences [n] of one epoch of one source stand in training. UserError if the run never reads them."""
        era = self.era_of(source, epoch)
        index = self.permutation(source, epoch).inverse(sequences)
        passed = epoch - int(self._first_epochs[era, source])
        return self.schedule.position_of(source, era, index + passed * self.sizes[era][source])

    def epochs_begun(self, step: int) -> Int64s:
        """[sources] epochs of each source that the steps before ``step`` began."""
        era = self.schedule.era(max(step - 1, 0))
        begun: Int64s = self._first_epochs[era] + -(-self.schedule.ordinals_end(step, era) // self._sizes[era])
        return begun

    def restarts(self) -> list[Restart]:
        """Where a change of seq_len begins an order anew with sequences of the epoch before unread."""
        found = []
        for era in range(1, len(self.sizes)):
            read = self.schedule.ordinals_end(self.schedule.eras[era].start_step, era - 1)
            used = self.schedule.counts(self.schedule.total_steps, era)
            for source, size in enumerate(self.sizes[era - 1]):
                if read[source] % size and used[source]:
                    epoch = int(self._first_epochs[era, source])
                    found.append(Restart(era, source, epoch, int(read[source]) % size, size))
        return found

    def era_of(self, source: int, epoch: int) -> int:
        """The era that an epoch of a source belongs to."""
        return int(np.searchsorted(self._first_epochs[:, source], epoch, side="right")) - 1

    def _permutation(self, source: int, epoch: int) -> Permutation | WindowPermutation:
        """The shuffle of one epoch of one source."""
        key = derive_key("order", self.seed, self.schedule.sources[source], epoch)
        era = self.era_of(source, epoch)
        size = self.sizes[era][source]
        if self.shuffle.mode == "full":
            return Permutation(size, key)
        chunk = max(1, self.shuffle.chunk_tokens // self.schedule.eras[era].seq_len)
        return WindowPermutation(size, key, chunk=chunk, window_chunks=self.shuffle.window_chunks)
