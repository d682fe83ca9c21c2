import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.data.order.window import WindowPermutation


@pytest.mark.slow
def test_bijective_by_enumeration_at_every_small_size(proof) -> None:
    for size in range(1, proof(40, 1500)):
        for chunk, window_chunks in ((1, 2), (3, 2), (7, 3), (64, 4)):
            permutation = WindowPermutation(size, size * 7, chunk=chunk, window_chunks=window_chunks)
            image = permutation(np.arange(size))
            assert np.array_equal(np.sort(image), np.arange(size)), (size, chunk, window_chunks)
            assert np.array_equal(permutation.inverse(image), np.arange(size))


@pytest.mark.proof
@given(st.integers(1, 1 << 45), st.integers(1, 1 << 12), st.integers(2, 200), st.data())
def test_inverse_undoes_at_any_size(size: int, chunk: int, window_chunks: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), dtype=np.int64)
    permutation = WindowPermutation(size, 5, chunk=chunk, window_chunks=window_chunks)
    image = permutation(indices)
    assert image.min() >= 0
    assert image.max() < size
    assert np.array_equal(permutation.inverse(image), indices)
    assert np.array_equal(permutation(permutation.inverse(indices)), indices)


def test_a_window_reads_whole_chunks_and_mixes_their_sequences() -> None:
    permutation = WindowPermutation(64 * 1000 + 17, 3, chunk=64, window_chunks=20)
    assert permutation.n_windows == 50
    image = permutation(np.arange(permutation.size))
    first = image[: 64 * 20]
    chunks, counts = np.unique(first // 64, return_counts=True)
    assert chunks.size in (20, 21)
    assert counts.max() == 64
    # neighbours are mixed inside the window, and the chunks of a window come from everywhere
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 5 / np.sqrt(first.size)
    assert abs(np.corrcoef(np.arange(first.size) // 64, first // 64)[0, 1]) < 5 / np.sqrt(first.size)
    assert abs(chunks.mean() / 1000 - 0.5) < 5 * np.sqrt(1 / 12 / 20)
    at = permutation.inverse(np.arange(64 * 5, 64 * 6))
    assert at.max() - at.min() < 2 * 64 * 20


def test_chunks_of_one_epoch_are_visited_in_another_order_in_the_next() -> None:
    one, other = (WindowPermutation(10_000, key, chunk=10, window_chunks=5)(np.arange(50)) for key in (1, 2))
    assert set((one // 10).tolist()) != set((other // 10).tolist())


def test_indices_outside_are_refused_and_shapes_kept() -> None:
    permutation = WindowPermutation(100, 1, chunk=7, window_chunks=3)
    assert permutation(np.arange(24).reshape(2, 12)).shape == (2, 12)
    assert permutation(np.array([], dtype=np.int64)).size == 0
    for index in (-1, 100):
        with pytest.raises(UserError, match=f"index {index}"):
            permutation([0, index])
        with pytest.raises(UserError, match=f"index {index}"):
            permutation.inverse([0, index])
