"""The held-out split is by group, has about the configured share, and only grows with it."""

from hypothesis import given
from hypothesis import strategies as st

from smalti.data.documents.heldout import HELDOUT, TRAIN, split_of


def heldout(groups, frac, seed=17):
    return {group for group in groups if split_of(group, seed=seed, heldout_frac=frac) == HELDOUT}


def test_share_is_close():
    groups = [f"file-{i}" for i in range(20_000)]
    # 4 standard deviations of a binomial with p = 0.05
    assert abs(len(heldout(groups, 0.05)) - 1000) < 4 * (20_000 * 0.05 * 0.95) ** 0.5


def test_none_at_zero_and_nested_when_it_grows():
    groups = [f"file-{i}" for i in range(2_000)]
    assert not heldout(groups, 0.0)
    assert heldout(groups, 0.02) < heldout(groups, 0.1) < heldout(groups, 0.4)


def test_another_seed_is_another_choice():
    groups = [f"file-{i}" for i in range(2_000)]
    assert heldout(groups, 0.1, seed=1) != heldout(groups, 0.1, seed=2)


@given(st.text(), st.integers(0, 2**40), st.floats(0, 0.49))
def test_depends_on_the_group_alone(group, seed, frac):
    first = split_of(group, seed=seed, heldout_frac=frac)
    assert first == split_of(group, seed=seed, heldout_frac=frac)
    assert first in (HELDOUT, TRAIN)
