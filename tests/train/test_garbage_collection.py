"""The collector runs between steps only, and its state is restored."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from smalti.train import garbage_collection
from smalti.train.garbage_collection import EVERY_STEPS, GarbageCollection


@pytest.fixture(autouse=True)
def _freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what conftest.py does for other tests."""
    monkeypatch.setattr(garbage_collection, "gc", gc)
    yield
    gc.freeze()


class _Loop:
    def __init__(self) -> None:
        self.me = self


def test_cycles_are_collected_between_steps_and_never_inside() -> None:
    with GarbageCollection() as garbage:
        assert not gc.isenabled()
        kept = weakref.ref(_Loop())
        [[] for _ in range(5000)]  # enough to start a collection by itself
        garbage.collect_if_due(1)
        assert kept() is not None
        garbage.collect_if_due(EVERY_STEPS)
        assert kept() is None
        other = weakref.ref(_Loop())
        garbage.collect_all()
        assert other() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError, match="x"), GarbageCollection():
            raise ValueError("x")
        assert not gc.isenabled()
    finally:
        gc.enable()
