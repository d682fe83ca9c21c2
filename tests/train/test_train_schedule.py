"""The learning rate over a run, and its durations."""

import itertools
import math

import pytest
import torch
from example_config import example_config
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from smalti.config.durations import BatchStageConfig, LengthConfig, RunLength, to_seconds
from smalti.config.run import JobConfig
from smalti.config.schema import NotAllowed
from smalti.config.train import ScheduleConfig
from smalti.train.cadence import Cadence
from smalti.train.schedule import LearningRate

FORTY = RunLength(40, ((0, 1),))


def _rates(**schedule: object) -> list[float]:
    train = {"duration": "100step", "global_batch_tokens": 10, "optimizer": {"lr": 2.0}, "schedule": schedule}
    rate = LearningRate.of(JobConfig.model_validate({"name": "rates", "train": train}))
    return [rate(step) for step in range(100)]


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_rises_stays_and_falls(shape: str) -> None:
    rates = _rates(warmup="10step", decay="0.2run", shape=shape, final_frac=0.1)
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10:80] == [2.0] * 70
    falling = rates[79:]
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert 0.2 < rates[-1] < 0.35


def test_the_linear_decay_is_even_and_ends_one_step_above_its_final_rate() -> None:
    rates = _rates(warmup="0step", decay="4step")
    assert rates[-5:] == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


NAMES = st.sampled_from(["wsd", "cosine", "inverse_sqrt"])


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    """A schedule and the steps of its run."""
    total, name = draw(st.integers(1, 300)), draw(NAMES)
    warmup = draw(st.integers(int(name == "inverse_sqrt"), total))
    decay = draw(st.integers(0, total - warmup))
    given: dict[str, object] = {"name": name, "warmup": f"{warmup}step"}
    if warmup:
        given["start_frac"] = draw(st.floats(0, 0.99))
    if name != "cosine":
        given["decay"] = f"{decay}step"
    if name != "cosine" and decay:
        given["shape"] = draw(st.sampled_from(["linear", "sqrt", "cosine"]))
    if name == "cosine" or decay:
        given["final_frac"] = draw(st.floats(0, 1))
    return ScheduleConfig.model_validate(given), total


def _naive(config: ScheduleConfig, total: int, n: int) -> float:
    """The share of the peak at n = step + 1: points that the definition names, and the curves between them."""
    warmup = int(config.warmup.removesuffix("step"))
    fall = total - warmup if config.name == "cosine" else int(config.decay.removesuffix("step"))
    if n <= warmup:
        return config.start_frac + (1 - config.start_frac) * n / warmup
    plateau = (warmup / n) ** 0.5 if config.name == "inverse_sqrt" else 1.0
    x = max(0.0, (n - (total - fall)) / (fall + 1))
    shape = "cosine" if config.name == "cosine" else config.shape
    left = {"linear": 1 - x, "sqrt": 1 - x**0.5, "cosine": (1 + math.cos(math.pi * x)) / 2}[shape]
    return plateau * (config.final_frac + (1 - config.final_frac) * left)


@pytest.mark.proof
@given(_schedules())
def test_equals_the_naive_formula_and_torch(drawn: tuple[ScheduleConfig, int]) -> None:
    config, total = drawn
    rate = LearningRate(config, lr=2.0, length=RunLength(total, ((0, 1),)))
    rates = [rate(step) for step in range(total)]
    assert rates == pytest.approx([2.0 * _naive(config, total, step + 1) for step in range(total)], abs=1e-12)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _naive(config, total, step + 1))
    for step in range(min(total, 20)):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[step], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.proof
@given(_schedules())
def test_rises_to_the_peak_then_never_rises_again_and_has_no_jumps(drawn: tuple[ScheduleConfig, int]) -> None:
    config, total = drawn
    rate = LearningRate(config, lr=2.0, length=RunLength(total, ((0, 1),)))
    rates, warmup = [rate(step) for step in range(total)], int(config.warmup.removesuffix("step"))
    assert all(0 <= value <= 2.0 for value in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == pytest.approx(sorted(rates[warmup:], reverse=True), rel=1e-12)
    if warmup:
        assert rates[warmup - 1] == 2.0
    fall = total - warmup if config.name == "cosine" else int(config.decay.removesuffix("step"))
    steepest = max(1 / (1 + max(warmup, 1)), math.pi / 2 / (fall + 1), (1 / (fall + 1)) ** 0.5)
    for earlier, later in itertools.pairwise(rates[max(0, warmup - 1) :]):
        assert earlier - later <= 2.0 * steepest * 1.5 + 1e-12


def test_cosine_is_the_textbook_one() -> None:
    rates = _rates(name="cosine", warmup="10step", final_frac=0.1)
    assert rates[9] == 2.0
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 91)) / 2))
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_inverse_square_root_halves_at_four_times_the_warmup_and_cools_down() -> None:
    rates = _rates(name="inverse_sqrt", warmup="10step", decay="20step")
    assert rates[39] == pytest.approx(1.0)
    assert rates[79] == pytest.approx(2.0 / 8**0.5)
    assert rates[99] == pytest.approx(2.0 / 10**0.5 / 21)


def test_rewarming_starts_at_start_frac() -> None:
    rates = _rates(warmup="4step", start_frac=0.2, decay="0.5run")
    assert rates[:5] == pytest.approx([0.8, 1.2, 1.6, 2.0, 2.0])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"name": "cosine", "decay": "0.3run"}, "schedule.decay has no effect with schedule 'cosine'"),
        ({"name": "cosine", "shape": "sqrt"}, "schedule.shape has no effect"),
        (
            {"decay": "0run", "final_frac": 0.1},
            "schedule.final_frac has no effect without a decay: schedule.decay=0run",
        ),
        ({"name": "inverse_sqrt", "decay": "0step", "shape": "sqrt"}, "schedule.shape has no effect without a decay"),
        ({"warmup": "0step", "start_frac": 0.1}, "start_frac=0.1 has no effect without a warmup"),
        ({"name": "inverse_sqrt", "warmup": "0run"}, "needs a warmup"),
    ],
)
def test_what_has_no_effect_is_refused(schedule: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate(schedule)


def test_a_cosine_may_warm_up_as_long_as_the_run() -> None:
    assert _rates(name="cosine", warmup="1run")[-1] == 2.0


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
    config = example_config(
        "train.duration=60step", "train.global_batch_tokens=16384", "train.optimizer.lr=1e-3",
        "data.history=[{at_step: 30, duration: 40step, global_batch_tokens: 8192, seq_len: 128, lr: 3e-3, "
        "schedule: {name: inverse_sqrt, warmup: 4step, start_frac: 0.2, decay: 0.5run, final_frac: 0.1}, "
        "stages: [{weights: {code: 1, prose: 1}}], batch_ramp: [{until: 10step, global_batch_tokens: 4096}]}]",
    )  # fmt: skip
    assert config.length == RunLength(60, ((0, 4096), (10, 8192), (30, 16384)))
    assert config.seq_len_parts == ((0, 128), (30, 256))
    assert config.tokens_by_seq_len() == {128: 10 * 4096 + 20 * 8192, 256: 30 * 16384}
    assert config.batches_and_lengths == ((4096, 128), (8192, 128), (16384, 256))
    before = example_config(
        "train.duration=40step", "train.batch_ramp=[{until: 10step, global_batch_tokens: 4096}]", "data.seq_len=128",
        "data.stages=[{weights: {code: 1, prose: 1}}]",
        "train.schedule={name: inverse_sqrt, warmup: 4step, start_frac: 0.2, decay: 0.5run, final_frac: 0.1}",
    )  # fmt: skip
    rate, former = LearningRate.of(config), LearningRate.of(before)
    assert [rate(step) for step in range(30)] == [former(step) for step in range(30)]
    assert rate(29) < rate(30) == 1e-3
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
