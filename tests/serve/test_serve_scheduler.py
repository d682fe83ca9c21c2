"""The scheduler alone: order, rows, memory set aside, prompts in outputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ByteTokenizer

from smalti.base.errors import UserError
from smalti.serve.engine.request import Request
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.scheduler import Limits, Scheduler, capacity_tokens

CONTEXT = 1000


def make_request(number: int, prompt_tokens: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        number, [1] * prompt_tokens, params, frozenset(), CONTEXT, ByteTokenizer().decode_stream(), lambda output: None
    )


@given(n_tokens=st.integers(0, 5000), limit=st.integers(1, 5000))
def test_a_row_has_room_for_at_most_twice_its_tokens(n_tokens: int, limit: int) -> None:
    n_tokens = min(n_tokens, limit)
    capacity = capacity_tokens(n_tokens, limit)
    assert capacity % 64 == 0
    assert n_tokens <= capacity <= max(64, 2 * n_tokens)


sizes = st.tuples(st.integers(1, 500), st.integers(1, 400))


@given(
    requests=st.lists(sizes, min_size=1, max_size=30),
    max_rows=st.integers(1, 8),
    cache_tokens=st.integers(1, 6000),
    prefill_tokens=st.integers(1, 300),
    ends=st.lists(st.integers(0, 7)),
)
def test_first_come_first_served_within_the_bounds(requests, max_rows, cache_tokens, prefill_tokens, ends) -> None:
    scheduler = Scheduler(Limits(max_rows=max_rows, prefill_tokens=prefill_tokens), cache_tokens, CONTEXT)
    prepared = [make_request(number, *size) for number, size in enumerate(requests)]
    for one in prepared:
        scheduler.add(one)
    begun: list[int] = []
    for turn in range(10_000):
        scheduler.admit()
        inside = scheduler.prefilling + scheduler.running
        assert inside, "what waits is let in when nobody is inside"
        assert len(inside) <= max_rows
        assert scheduler.reserved_tokens == sum(capacity_tokens(one.max_cached_tokens, CONTEXT) for one in inside)
        assert scheduler.reserved_tokens <= scheduler.cache_tokens
        read = 0
        for one, end in scheduler.prefills():
            assert end % prefill_tokens == 0 or end == len(one.prompt_ids)
            read += end - one.cached_tokens
            one.cached_tokens = end
            if end == len(one.prompt_ids):
                begun.append(one.request_id)
                scheduler.start(one)
        assert read <= prefill_tokens
        assert read > 0 or not scheduler.prefilling
        if scheduler.running:
            scheduler.remove(scheduler.running[ends[turn % len(ends)] % len(scheduler.running) if ends else 0])
        if not scheduler.waiting and not scheduler.prefilling and not scheduler.running:
            break
    assert begun == list(range(len(requests)))
    assert scheduler.reserved_tokens == 0


def test_a_request_may_leave_from_anywhere() -> None:
    scheduler = Scheduler(Limits(max_rows=2, prefill_tokens=10), 10_000, CONTEXT)
    first, second, third = (make_request(number, 25, 10) for number in range(3))
    for one in (first, second, third):
        scheduler.add(one)
    scheduler.admit()
    scheduler.remove(third)
    scheduler.remove(second)
    assert scheduler.reserved_tokens == 64
    scheduler.start(first)
    scheduler.remove(first)
    assert scheduler.reserved_tokens == 0
    assert not scheduler.waiting


@pytest.mark.parametrize("name", ["max_rows", "max_waiting", "cache_bytes", "prefill_tokens", "step_rows"])
def test_limits_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}=-1"):
        Limits(**{name: -1})
