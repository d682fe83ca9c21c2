"""The learning rate over a run, and the durations that it is given in."""

import itertools

import pytest
from made_config import made_config

from smalti.config.durations import BatchStageConfig, LengthConfig, RunLength, to_seconds
from smalti.config.run import JobConfig
from smalti.config.schema import NotAllowed
from smalti.train.cadence import Cadence
from smalti.train.schedule import WarmupStableDecay

FORTY = RunLength(40, ((0, 1),))


def _rates(**schedule: object) -> list[float]:
    train = {"duration": "100step", "global_batch_tokens": 10, "optimizer": {"lr": 2.0}, "schedule": schedule}
    rate = WarmupStableDecay.of(JobConfig.model_validate({"name": "rates", "train": train}))
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


def _length(duration: str, batch: int, *ramp: tuple[str, int]) -> RunLength:
    parts = [BatchStageConfig(until=until, global_batch_tokens=tokens) for until, tokens in ramp]
    return RunLength.of(LengthConfig(duration=duration, global_batch_tokens=batch, batch_ramp=parts))


def test_durations() -> None:
    assert _length("100step", 7).total_steps == 100
    assert _length("100tok", 7).total_steps == 15
    assert _length("10step", 1).step_at("0.26run") == 3
    assert _length("1000step", 100).step_at("1e3tok") == 10
    assert to_seconds("30min") == 1800
    assert to_seconds("3step") is None


def test_cadence_in_steps_is_a_function_of_the_step() -> None:
    every = Cadence("0.25run", FORTY)
    assert [step for step in range(1, 41) if every.due(step)] == [10, 20, 30, 40]
    never_zero = Cadence("0.001run", FORTY)
    assert never_zero.due(1)


def test_cadence_in_tokens_counts_the_ramp() -> None:
    every = Cadence("100tok", _length("14step", 100, ("4step", 25), ("8step", 50)))
    assert [step for step in range(1, 15) if every.due(step)] == [4, 6, 8, *range(9, 15)]


def test_a_ramp_in_steps_and_tokens() -> None:
    length = _length("1000tok", 100, ("4step", 25), ("300tok", 50))
    assert (length.total_steps, length.total_tokens) == (15, 1000)
    assert length.batches == ((0, 25), (4, 50), (8, 100))
    assert [length.batch_tokens(step) for step in (0, 3, 4, 7, 8, 14)] == [25, 25, 50, 50, 100, 100]
    assert [length.tokens(steps) for steps in (0, 4, 6, 8, 15)] == [0, 100, 200, 300, 1000]
    assert [length.step_at(text) for text in ("100tok", "200tok", "300tok", "1000tok", "0.4run", "7step")] == [
        4, 6, 8, 15, 6, 7,
    ]  # fmt: skip
    assert length.exact_last_steps("700tok") == 7
    assert length.exact_last_steps("800tok") == 9


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([("4step", 25), ("2step", 50)], r"batch_ramp\[1\] ends at '2step'"),
        ([("10tok", 25)], r"batch_ramp\[0\] ends at '10tok', which is step 0"),
        ([("14step", 25)], "ends before"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(ramp: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(NotAllowed, match=message):
        _length("14step", 100, *ramp)


def test_the_first_steps_of_a_forked_run_keep_their_batches_and_rates() -> None:
    config = made_config(
        "train.duration=60step", "train.global_batch_tokens=16384", "train.optimizer.lr=1e-3",
        "data.history=[{at_step: 30, duration: 40step, global_batch_tokens: 8192, seq_len: 128, lr: 3e-3, "
        "stages: [{weights: {code: 1, prose: 1}}], batch_ramp: [{until: 10step, global_batch_tokens: 4096}]}]",
    )  # fmt: skip
    assert config.length == RunLength(60, ((0, 4096), (10, 8192), (30, 16384)))
    assert config.seq_len_parts == ((0, 128), (30, 256))
    assert config.tokens_by_seq_len() == {128: 10 * 4096 + 20 * 8192, 256: 30 * 16384}
    assert config.batches_and_lengths == ((4096, 128), (8192, 128), (16384, 256))
    before = made_config(
        "train.duration=40step", "train.batch_ramp=[{until: 10step, global_batch_tokens: 4096}]", "data.seq_len=128",
        "data.stages=[{weights: {code: 1, prose: 1}}]",
    )  # fmt: skip
    rate, former = WarmupStableDecay.of(config), WarmupStableDecay.of(before)
    assert [rate(step) for step in range(30)] == [former(step) for step in range(30)]
    assert rate(30) == 1e-3
    data, length = config.data.before_fork()
    assert (data, length) == (before.data, before.length)


def test_cadence_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("smalti.base.clock.now_s", lambda: now[0])
    every = Cadence("30s", FORTY)
    assert not every.due(1)
    now[0] += 30
    assert every.due(2)
    every.done()
    assert not every.due(3)
