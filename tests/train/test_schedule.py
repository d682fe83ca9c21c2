"""The learning rate over a run, and the durations that it is given in."""

import itertools

import pytest

from smalti.config.durations import to_seconds, to_steps, total_steps
from smalti.config.train import OptimizerConfig, ScheduleConfig, TrainConfig
from smalti.train.cadence import Cadence
from smalti.train.schedule import WarmupStableDecay


def _rates(**schedule: object) -> list[float]:
    train = TrainConfig(
        duration="100step",
        global_batch_tokens=10,
        optimizer=OptimizerConfig(lr=2.0),
        schedule=ScheduleConfig(**schedule),
    )
    rate = WarmupStableDecay.of(train, total_steps=100)
    return [rate(step) for step in range(100)]


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_rises_stays_and_falls(shape: str) -> None:
    rates = _rates(warmup="10step", decay="0.2run", shape=shape, final_frac=0.1)
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10:80] == [2.0] * 70
    falling = rates[79:]
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert 0.2 < rates[-1] < 0.35


def test_linear_fall_is_even_and_ends_one_step_above_its_goal() -> None:
    rates = _rates(warmup="0step", decay="4step")
    assert rates[-5:] == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


def test_durations() -> None:
    assert total_steps("100step", global_batch_tokens=7) == 100
    assert total_steps("100tok", global_batch_tokens=7) == 15
    assert to_steps("0.25run", total_steps=10, global_batch_tokens=1) == 2
    assert to_steps("1e3tok", total_steps=1000, global_batch_tokens=100) == 10
    assert to_steps("50step", total_steps=10, global_batch_tokens=1) == 10
    assert to_seconds("30min") == 1800
    assert to_seconds("3step") is None


def test_cadence_in_steps_is_a_function_of_the_step() -> None:
    every = Cadence("0.25run", total_steps=40, global_batch_tokens=1)
    assert [step for step in range(1, 41) if every.due(step)] == [10, 20, 30, 40]
    assert not every.by_clock
    never_zero = Cadence("0.001run", total_steps=40, global_batch_tokens=1)
    assert never_zero.due(1)


def test_cadence_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("smalti.base.clock.now_s", lambda: now[0])
    every = Cadence("30s", total_steps=40, global_batch_tokens=1)
    assert every.by_clock
    assert not every.due(1)
    now[0] += 30
    assert every.due(2)
    every.done()
    assert not every.due(3)
