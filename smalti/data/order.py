"""The order of training as arithmetic: position -> (source, epoch, sequence), and back.

Each epoch of each source is shuffled by a keyed permutation of its own, so there is no epoch array, no index to build
and nothing to store. Promises: a bijection for every size from 1 to 2**62, the same on every machine; the order
depends on seed, names of the sources, their numbers of sequences and the schedule, and on nothing else. Does not
promise secrecy: the cipher is made to shuffle, not to hide.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.data.mixture import Int64s, Schedule

MAX_SIZE = 1 << 62
_ROUNDS = 8
_SMALL_ROUNDS = 16
_SMALL_BITS = 20
# odd multipliers of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_FOLD = np.uint64(32)

_Words = npt.NDArray[np.uint64]


class Permutation:
    """A keyed bijection of 0 .. size-1, computed for any indices without a table.

    A Feistel network over a left and a right part of ceil(b/2) and floor(b/2) bits, b the bits that hold size-1:
    the parts may be unequal, so the domain is below 2 * size, and an index that falls outside is passed through again
    (cycle-walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) twice on average at worst. The
    round function multiplies, folds by xor-shift and multiplies again: affine round functions leave the low bits of
    neighbours correlated (0.998 at lag 1 for 2**20). Eight rounds; sixteen for small domains, where each mixes less.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise UserError(f"a permutation of {size:,}", allowed="1 to 2**62")
        bits = (size - 1).bit_length()
        self.size, self.key = size, key
        self._left, self._right = -(-bits // 2), bits // 2
        rounds = _SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS
        self._keys = [np.uint64(derive_key("feistel", key, size, number)) for number in range(rounds)]

    def __call__(self, indices: npt.ArrayLike) -> Int64s:
        """Where each index [n] goes, int64 [n]."""
        return self._walk(indices, forward=True)

    def inverse(self, indices: npt.ArrayLike) -> Int64s:
        """Which index goes to each of these [n], int64 [n]."""
        return self._walk(indices, forward=False)

    def _walk(self, indices: npt.ArrayLike, *, forward: bool) -> Int64s:
        given = np.asarray(indices, dtype=np.int64)
        if given.size and not (given.min() >= 0 and given.max() < self.size):
            raise UserError(
                f"index {given.max() if given.min() >= 0 else given.min():,}", allowed=f"0 to {self.size - 1:,}"
            )
        if self.size == 1:
            return np.zeros(given.shape, dtype=np.int64)
        through = self._encrypt if forward else self._decrypt
        words = through(given.ravel().astype(np.uint64))
        outside = np.flatnonzero(words >= self.size)
        while outside.size:
            again = through(words[outside])
            words[outside] = again
            outside = outside[again >= self.size]
        return words.astype(np.int64).reshape(given.shape)

    def _encrypt(self, words: _Words) -> _Words:
        left, right = self._cut(words)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = left ^ _mix(right, key, self._left)
            else:
                right = right ^ _mix(left, key, self._right)
        return (left << np.uint64(self._right)) | right

    def _decrypt(self, words: _Words) -> _Words:
        left, right = self._cut(words)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                left = left ^ _mix(right, key, self._left)
            else:
                right = right ^ _mix(left, key, self._right)
        return (left << np.uint64(self._right)) | right

    def _cut(self, words: _Words) -> tuple[_Words, _Words]:
        return words >> np.uint64(self._right), words & np.uint64((1 << self._right) - 1)


def _mix(words: _Words, key: np.uint64, bits: int) -> _Words:
    """The round function: ``bits`` bits that depend on every bit of the word and of the key."""
    if bits == 0:
        return np.zeros_like(words)
    mixed = (words + key) * _MULTIPLY_1
    mixed ^= mixed >> _FOLD
    mixed *= _MULTIPLY_2
    return np.asarray(mixed >> np.uint64(64 - bits), dtype=np.uint64)


class Order:
    """Position of training -> (source, epoch, sequence). Holds no array longer than a table of the schedule."""

    def __init__(self, schedule: Schedule, sizes: Mapping[str, int], seed: int) -> None:
        """``sizes``: sequences in one epoch of each source."""
        assert set(sizes) == set(schedule.sources), "sizes and schedule name other sources"
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"source '{name}' has {size} sequences", allowed="1 or more")
        self.schedule, self.seed = schedule, seed
        self.sizes = tuple(sizes[name] for name in schedule.sources)
        self._sizes = np.array(self.sizes, dtype=np.int64)

    def locate(self, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int16], Int64s, Int64s]:
        """Positions [n] -> source index [n], epoch [n], sequence within the source [n]."""
        source, ordinal = self.schedule.locate(positions)
        size = self._sizes[source]
        epoch, index = np.divmod(ordinal, size)
        sequence = np.empty_like(index)
        # a batch meets one or two epochs of each source, so this loop is short
        for which, number in np.unique(np.stack([source.ravel(), epoch.ravel()]), axis=1).T.tolist():
            here = (source == which) & (epoch == number)
            sequence[here] = self.permutation(which, number)(index[here])
        return source, epoch, sequence

    def position_of(self, source: int, epoch: int, sequences: npt.ArrayLike) -> Int64s:
        """Where sequences [n] of one epoch of one source stand in training. UserError if the run never reads them."""
        index = self.permutation(source, epoch).inverse(sequences)
        return self.schedule.position_of(source, index + epoch * self.sizes[source])

    def permutation(self, source: int, epoch: int) -> Permutation:
        """The shuffle of one epoch of one source."""
        key = derive_key("order", self.seed, self.schedule.sources[source], epoch)
        return Permutation(self.sizes[source], key)
