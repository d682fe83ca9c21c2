"""Ranks that meet: alike they begin; one that differs, is missing or comes late is named, on all ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.distributed.group.handshake import Card, meet, names_of

SAME = {"smalti": "1.0", "device": "cpu", "run": "r", "placement": "p"}
CONFIG = {"train.optimizer.lr": 0.1, "train.log_every": "1step"}


def ranks_meet(cards: dict[int, Card], size: int, configs: dict[int, Any] | None = None, timeout_s: float = 20) -> Any:
    """Return the hosts or the error on each rank of ``cards``, and the store."""
    store = dist.HashStore()

    def join(rank: int) -> Any:
        try:
            return meet(store, rank, size, cards[rank], (configs or {}).get(rank, CONFIG), timeout_s)
        except SmaltiError as error:
            return error

    with ThreadPoolExecutor(len(cards)) as pool:
        return dict(zip(cards, pool.map(join, cards), strict=True)), store


def card(rank: int, **same: Any) -> Card:
    return Card(f"h{rank // 2}", 100 + rank, {**SAME, **same})


def test_ranks_that_are_alike_begin_and_know_where_each_is():
    results, _ = ranks_meet({rank: card(rank) for rank in range(4)}, 4)
    assert set(results.values()) == {("h0", "h0", "h1", "h1")}


def test_ranks_of_another_version_are_named_on_all_ranks():
    cards = {0: card(0), 1: card(1), 2: card(2, smalti="1.1"), 3: card(3, smalti="1.1")}
    results, _ = ranks_meet(cards, 4)
    for error in results.values():
        assert isinstance(error, UserError)
        assert error.message == "ranks 2-3 (h1) differ from rank 0: smalti: 1.0 -> 1.1"


def test_a_rank_with_another_config_is_named_with_the_values():
    cards = {0: card(0), 1: card(1, run="other", placement="other")}
    results, _ = ranks_meet(cards, 2, {1: {**CONFIG, "train.optimizer.lr": 0.2}})
    assert [error.message for error in results.values()] == [
        "rank 1 (h0) differs from rank 0: train.optimizer.lr: 0.1 -> 0.2"
    ] * 2


def test_a_rank_that_cannot_train_gives_its_reason_to_all():
    cards = {0: card(0), 1: Card("b", 5, {**SAME, "device": "cpu"}, "torch sees no CUDA device")}
    results, _ = ranks_meet(cards, 2)
    assert [error.message for error in results.values()] == ["rank 1 (b): torch sees no CUDA device"] * 2


@pytest.mark.slow
def test_one_that_differs_is_not_waited_for_until_all_are_here():
    results, _ = ranks_meet({0: card(0), 1: card(1, device="cuda")}, 3, timeout_s=60)
    assert all(error.message == "rank 1 (h0) differs from rank 0: device: cpu -> cuda" for error in results.values())


def test_missing_ranks_are_named_and_a_late_one_gets_an_error():
    results, store = ranks_meet({rank: card(rank) for rank in (0, 1, 4)}, 5, timeout_s=0.3)
    for error in results.values():
        assert isinstance(error, RetryableError)
        assert error.message == "ranks 2-3 did not join within 0.3 s; 3 of 5 ranks joined, on h0, h2"
    with pytest.raises(RetryableError, match=r"rank 2 \(h1, process 102\) joins too late: .* ended without it"):
        meet(store, 2, 5, card(2), CONFIG, 0.3)


@pytest.mark.slow
def test_without_rank_0_the_others_say_so():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RetryableError, match="rank 1 got no answer from rank 0"):
        meet(store, 1, 2, card(1), CONFIG, 0.2)


def test_a_second_process_of_one_rank_learns_that_the_attempt_has_begun():
    _, store = ranks_meet({0: card(0), 1: card(1)}, 2)
    with pytest.raises(RetryableError, match="begun without it; process 101 on h0 is rank 1"):
        meet(store, 1, 2, Card("h9", 7, SAME), CONFIG, 0.2)


def test_names():
    hosts = ("a", "a", "b", "b", "a")
    assert names_of([3]) == "rank 3"
    assert names_of([0, 1, 2, 4]) == "ranks 0-2, 4"
    assert names_of([4, 3, 0, 1], hosts) == "ranks 0-1, 4 (a) and 3 (b)"
