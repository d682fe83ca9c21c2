"""A statistical battery on shuffles: ours passes at every size, place and key; weak ones that others shipped fail.

Each statistic is made a z: standard deviations from what a true random permutation shows. 6 of them is one in 10**9.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from weak_orders import AffineFeistel, Linear

from smalti.data.order.permutation import Permutation
from smalti.data.order.window import WindowPermutation

pytestmark = pytest.mark.slow

Int64s = npt.NDArray[np.int64]
Shuffle = Callable[[Int64s], Int64s]
Make = Callable[[int, int], Shuffle]
SIZES = (1 << 14, 1 << 17, 1 << 20, 10_007, 100_003, 1_000_003, 3_000_000, (1 << 17) + 1, 3 << 15)
WINDOW, BINS, LAGS, BITS = 8192, 64, (1, 2, 3, 64, 1024), 4
LIMIT = 6.0


def statistics(image: Int64s, size: int) -> dict[str, float]:
    """z of every test on consecutive images of one window."""
    n, found = image.size, {}
    left = np.sqrt(max(1 - n / size, 1e-9))  # drawing without repetition spreads less
    expected = n * np.diff(-(-np.arange(BINS + 1) * size // BINS)) / size
    chi_square = ((np.bincount(image * BINS // size, minlength=BINS) - expected) ** 2 / expected).sum()
    if n < size:
        found["chi-square of places"] = (chi_square / left**2 - (BINS - 1)) / np.sqrt(2 * (BINS - 1))
    where = image / size
    for lag in LAGS:
        found[f"serial {lag}"] = _z(where[:-lag], where[lag:])
        steps = ((image[lag:] - image[:-lag]) % size) * BINS // size
        even = steps.size / BINS
        chi = ((np.bincount(steps, minlength=BINS) - even) ** 2 / even).sum()
        # bins of a remainder differ by a part of a place, and steps share their ends: a little wider than chi-square
        found[f"steps {lag}"] = (chi - (BINS - 1)) / np.sqrt(2 * (BINS - 1))
        for bit in range(BITS):
            bits = (image >> bit & 1).astype(float)
            found[f"bit {bit} lag {lag}"] = _z(bits[:-lag], bits[lag:])
    found["place and image"] = _z(np.arange(n, dtype=float), where)
    for bit in range(BITS):
        found[f"bit {bit} of place and image"] = _z((np.arange(n) >> bit & 1).astype(float), (image >> bit & 1) * 1.0)
    return found


def _z(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    if one.std() == 0 or other.std() == 0:
        return float("inf")
    return float(np.corrcoef(one, other)[0, 1] * np.sqrt(one.size))


def worst(make: Make, sizes: tuple[int, ...], keys: int) -> tuple[float, int, str]:
    """Return (largest |z|, number of statistics, its name) at the start, the middle and the end of an epoch."""
    top, count, name = 0.0, 0, ""
    for size in sizes:
        n = min(WINDOW, size)
        for key in range(keys):
            shuffle = make(size, key * 7919 + 1)
            for start in sorted({0, (size - n) // 2, size - n}):
                image = shuffle(np.arange(start, start + n))
                for test, z in statistics(image, size).items():
                    # a chi-square far below its mean is as little random as one far above; its lower tail is short
                    count += 1
                    if abs(z) > top:
                        top, name = abs(z), f"{test} at {size:,} from {start:,}, key {key}"
    return top, count, name


def test_ours_passes_and_weak_orders_fail(proof, record) -> None:
    keys = proof(1, 60)
    figures = {}
    for name, make in {"ours": Permutation, "linear": Linear, "affine feistel": AffineFeistel}.items():
        top, count, where = worst(make, SIZES, keys if name == "ours" else proof(1, 2))
        figures[name] = {"largest_z": round(min(top, 1e9), 2), "statistics": count, "where": where}
    record("order_battery", figures)
    assert figures["ours"]["largest_z"] < LIMIT, figures
    assert figures["linear"]["largest_z"] > 10 * LIMIT, figures
    assert figures["affine feistel"]["largest_z"] > 10 * LIMIT, figures


@pytest.mark.sample(6)
@pytest.mark.parametrize("weak", [Linear, AffineFeistel])
@pytest.mark.parametrize("size", SIZES)
def test_weak_orders_fail_at_each_size_and_are_bijections(weak: Make, size: int) -> None:
    if size <= 1 << 17:
        assert np.array_equal(np.sort(weak(size, 3)(np.arange(size))), np.arange(size))
    assert worst(weak, (size,), 1)[0] > LIMIT


def test_windows_pass_inside_a_window(proof) -> None:
    """Sequences of one window are as mixed as those of a small source; chunks of an epoch too."""
    size, chunk, window_chunks = 1 << 20, 128, 512

    def first_window(_: int, key: int) -> Shuffle:
        shuffle = WindowPermutation(size, key, chunk=chunk, window_chunks=window_chunks)
        ranks = np.argsort(np.argsort(shuffle(np.arange(chunk * window_chunks))))
        return lambda indices: ranks[indices]

    def chunks(n: int, key: int) -> Shuffle:
        shuffle = WindowPermutation(n * chunk, key, chunk=chunk, window_chunks=1)
        return lambda indices: shuffle(indices * chunk) // chunk

    for make, n in ((first_window, chunk * window_chunks), (chunks, proof(WINDOW, size // chunk * 4))):
        top, _, where = worst(make, (n,), proof(1, 60))
        assert top < LIMIT, where
