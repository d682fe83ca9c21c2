"""Weak shuffles, which the battery must distinguish from a good one. Reimplemented from the ideas."""

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Linear:
    """(a * x + b) mod size, with a prime to size."""

    def __init__(self, size: int, key: int) -> None:
        rng = np.random.default_rng(key)
        self.size, self.add = size, int(rng.integers(0, size))
        self.times = int(rng.integers(size // 3, size - 1)) | 1
        while np.gcd(self.times, size) != 1:
            self.times += 2

    def __call__(self, indices: Int64s) -> Int64s:
        return (indices * self.times + self.add) % self.size


class AffineFeistel:
    """A Feistel network over whole bits whose round function is right * constant + key modulo 2**k, cycle-walking."""

    def __init__(self, size: int, key: int, rounds: int = 5) -> None:
        self.size, self.half = size, max(1, -(-(size - 1).bit_length() // 2))
        rng = np.random.default_rng(key)
        self.mask = (1 << self.half) - 1
        self.constant = 0x9E3779B1 & self.mask | 1
        self.keys = rng.integers(0, self.mask + 1, rounds)

    def __call__(self, indices: Int64s) -> Int64s:
        out = self._through(indices.astype(np.int64))
        while (outside := out >= self.size).any():
            out[outside] = self._through(out[outside])
        return out

    def _through(self, words: Int64s) -> Int64s:
        left, right = words >> self.half, words & self.mask
        for key in self.keys:
            left, right = right, left ^ ((right * self.constant + key) & self.mask)
        return left << self.half | right
