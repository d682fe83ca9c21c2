"""Keys: the same in every version, different for different parts, evenly distributed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.rng import derive_key

PARTS = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=4), max_size=4)


def test_stable_for_ever() -> None:
    """Data orders and initial weights of all runs depend on these values."""
    assert derive_key() == 3797230976420062948
    assert derive_key(17, "order", 0) == 289906042309802401
    assert derive_key("a", -3) == 2450115132789607087


@given(PARTS, PARTS)
def test_equal_parts_equal_keys_and_only_they(first: list[int | str], second: list[int | str]) -> None:
    assert (derive_key(*first) == derive_key(*second)) == (first == second)
    assert 0 <= derive_key(*first) < 2**63


def test_kind_and_place_of_a_part_count() -> None:
    keys = {derive_key(1), derive_key("1"), derive_key("a", "bc"), derive_key("ab", "c"), derive_key("abc")}
    keys |= {derive_key(1, 2), derive_key(2, 1), derive_key(12), derive_key("")}
    assert len(keys) == 9


def test_numpy_integers_are_integers() -> None:
    assert derive_key(np.int64(5), np.uint16(7)) == derive_key(5, 7)


@pytest.mark.parametrize("part", [1.0, None, (1,), b"a"])
def test_other_kinds_are_refused(part: object) -> None:
    with pytest.raises(TypeError):
        derive_key(part)  # type: ignore[arg-type]


def test_bits_are_even() -> None:
    keys = np.array([derive_key("bits", index) for index in range(4000)], dtype=np.uint64)
    for bit in range(63):
        share = float(((keys >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 0.04, bit
