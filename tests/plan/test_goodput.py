"""The closed form of goodput: the published table, the best interval, spare nodes, and what must hold for any job."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.cost.failures import DAY_S, mtbf_s, optimal_s
from smalti.plan.failures.goodput import (
    Recovery,
    Timing,
    daly_s,
    downtime_s,
    goodput_frac,
    poisson_interval,
    poisson_quantile,
    shares,
    spare_nodes,
    young_s,
)

COLUMNS = (("manual", 30, 1800, 1200), ("2024", 30, 600, 900), ("quick", 30, 30, 300), ("goal", 1, 30, 120),
           ("best", 0.05, 20, 60))  # fmt: skip
"""Name, stall, detection and restart in seconds."""
ROWS = {512: (96.4, 97.3, 97.9, 99.6, 99.9), 1024: (94.0, 95.7, 97.0, 99.3, 99.8), 3072: (86.3, 90.6, 94.3, 98.6, 99.5),
        16384: (57.2, 69.8, 84.4, 95.4, 98.1)}  # fmt: skip
"""GPUs -> goodput in percent at one failure for each 1,000 GPU-days, tau = sqrt(2 C M)."""
MTBF_H = {512: "46.9", 1024: "23.4", 3072: "7.8", 16384: "1.46"}
TAU_MIN = {(512, "goal"): "9.7", (1024, "goal"): "6.8", (3072, "2024"): "21.7", (3072, "goal"): "4.0",
           (16384, "goal"): "1.7"}  # fmt: skip


def cell(gpus: int, column: str) -> Timing:
    """A job of the table."""
    stall, detect, restart = next(rest for name, *rest in COLUMNS if name == column)
    mean = mtbf_s(1.0, gpus)
    return Timing(mean, stall, young_s(stall, mean), (Recovery(detect, restart),))


@pytest.mark.parametrize("gpus", ROWS)
def test_the_table_of_goodput_to_the_digits_printed(gpus: int) -> None:
    found = [round(100 * goodput_frac(cell(gpus, name)), 1) for name, *_ in COLUMNS]
    assert found == list(ROWS[gpus])
    hours = mtbf_s(1.0, gpus) / 3600
    assert f"{hours:.{len(MTBF_H[gpus].partition('.')[2])}f}" == MTBF_H[gpus]


def test_the_intervals_of_the_table() -> None:
    # 21.65 minutes are printed as 21.7; Python's format rounds the float below it down
    for (gpus, column), printed in TAU_MIN.items():
        assert cell(gpus, column).interval_s / 60 == pytest.approx(float(printed), abs=0.0501)


@pytest.mark.parametrize(
    ("nodes", "expected"), [(64, (2, 4, 9)), (128, (3, 6, 14)), (384, (5, 13, 33)), (2048, (16, 47, 140))]
)
def test_the_table_of_spares(nodes: int, expected: tuple[int, ...]) -> None:
    assert tuple(spare_nodes(nodes, 8 / 1000, days) for days in (0.5, 2, 7)) == expected


def walked(timing: Timing, attempts: int, seed: int) -> float:
    """Goodput by walking from event to event: the slow way, which knows no formula."""
    draw, kept, total = random.Random(seed), 0.0, 0.0
    for _ in range(attempts):
        dies, now, work = draw.expovariate(1 / timing.mtbf_s), 0.0, 0.0
        uploads: list[tuple[float, float]] = []
        while now < dies:
            now, work = now + timing.interval_s + timing.stall_s, work + timing.interval_s
            uploads.append((now + timing.upload_s, work))
        kept += max((saved for at, saved in uploads if at <= dies), default=0.0)
        total += dies
        while True:
            (one,) = draw.choices(timing.recoveries, [each.frac for each in timing.recoveries])
            strikes = draw.expovariate(1 / timing.mtbf_s) if timing.restarts_fail else math.inf
            total += min(strikes, one.whole_s)
            if strikes >= one.whole_s:
                break
    return kept / total


@pytest.mark.sample(2)
@pytest.mark.proof
@pytest.mark.parametrize("restarts_fail", [False, True])
@pytest.mark.parametrize("upload_s", [0.0, 250.0, 600.0])
def test_closed_form_equals_walking(upload_s: float, restarts_fail: bool) -> None:
    kinds = (Recovery(30, 300, 0.6), Recovery(600, 120, 0.3), Recovery(2000, 3000, 0.1))
    timing = Timing(5000, 40, 600, kinds, upload_s=upload_s, restarts_fail=restarts_fail)
    assert walked(timing, 60_000, seed=5) == pytest.approx(goodput_frac(timing), rel=0.01)


times = st.floats(1, 1e5)
paces = st.builds(
    lambda mean, stall, interval, detect, restart, upload, fail: Timing(
        mean, stall, interval, (Recovery(detect, restart),), upload * interval, fail
    ),
    st.floats(1e4, 1e8), st.floats(0, 1e3), times, times, times, st.floats(0, 1), st.booleans(),
)  # fmt: skip


@pytest.mark.proof
@given(paces)
def test_shares_are_shares(timing: Timing) -> None:
    found = vars(shares(timing))
    assert sum(found.values()) == pytest.approx(1)
    assert all(0 <= value <= 1 for value in found.values())
    assert 0 < found["useful_frac"] < 1 or timing.interval_s > 20 * timing.mtbf_s


@pytest.mark.proof
@given(paces, st.floats(1.01, 10))
def test_goodput_is_monotone(timing: Timing, factor: float) -> None:
    before, one = goodput_frac(timing), timing.recoveries[0]
    slack = 1e-12
    assert goodput_frac(replace(timing, mtbf_s=timing.mtbf_s * factor)) >= before - slack
    assert goodput_frac(replace(timing, stall_s=timing.stall_s * factor)) <= before + slack
    assert goodput_frac(replace(timing, upload_s=timing.upload_s * factor)) <= before + slack
    slower = replace(timing, recoveries=(replace(one, restart_s=one.restart_s * factor),))
    assert goodput_frac(slower) <= before + slack
    later = replace(timing, recoveries=(replace(one, detect_s=one.detect_s * factor),))
    assert goodput_frac(later) <= before + slack
    assert (
        goodput_frac(replace(timing, restarts_fail=True)) <= goodput_frac(replace(timing, restarts_fail=False)) + slack
    )


@pytest.mark.proof
@given(st.floats(0.01, 1e3), st.floats(1.0, 1e8), st.floats(0.02, 50))
def test_no_interval_beats_the_best(stall: float, mean: float, factor: float) -> None:
    best = optimal_s(stall, mean)

    def at(interval: float) -> float:
        return goodput_frac(Timing(mean, stall, interval, (Recovery(60, 60),)))

    for other in (best * factor, young_s(stall, mean), daly_s(stall, mean)):
        if other > 0:
            assert at(other) <= at(best) * (1 + 1e-9)


@pytest.mark.proof
@given(st.floats(0.01, 1e3), st.floats(10, 1e6))
def test_dalys_interval_is_close(stall: float, ratio: float) -> None:
    """Within 0.2 % of the best goodput down to an MTBF of ten stalls; Young's within 4 %."""
    mean = stall * ratio
    best, daly, young = (
        goodput_frac(Timing(mean, stall, interval, (Recovery(60, 60),)))
        for interval in (optimal_s(stall, mean), daly_s(stall, mean), young_s(stall, mean))
    )
    assert daly >= 0.998 * best
    assert young >= 0.96 * best


@pytest.mark.parametrize(("mean_min", "printed_min"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")])
def test_dalys_own_examples(mean_min: float, printed_min: str) -> None:
    """Figures 3 to 5 of the paper: a stall of 5 minutes."""
    found = daly_s(5 * 60, mean_min * 60) / 60
    assert f"{found:.{len(printed_min.partition('.')[2])}f}" == printed_min


def test_without_failures() -> None:
    timing = Timing(mtbf_s(0, 3072), 30, 600, (Recovery(60, 60),), upload_s=10, restarts_fail=True)
    assert goodput_frac(timing) == 600 / 630
    assert downtime_s(timing) == 120


def test_hopeless_jobs_have_no_goodput_and_no_overflow() -> None:
    timing = Timing(1.0, 30, 1e6, (Recovery(1e6, 1e6),), restarts_fail=True)
    assert goodput_frac(timing) == 0.0
    assert sum(vars(shares(timing)).values()) == pytest.approx(1)


@pytest.mark.parametrize(("stall", "mean"), [(0, 10), (10, math.inf), (-1, 10), (1, 0)])
def test_no_optimal_interval(stall: float, mean: float) -> None:
    with pytest.raises(ValueError, match="optimal interval"):
        optimal_s(stall, mean)


@pytest.mark.parametrize("mean", [0.01, 0.7, 3.0, 20.0])
def test_poisson_quantile_is_the_first_that_covers(mean: float) -> None:
    def below(n: int) -> float:
        return sum(mean**k / math.factorial(k) for k in range(n + 1)) * math.exp(-mean)

    for frac in (0.025, 0.5, 0.99):
        n = poisson_quantile(mean, frac)
        assert below(n) >= frac
        assert n == 0 or below(n - 1) < frac


def test_poisson_of_large_means_is_nearly_normal() -> None:
    for mean in (1e4, 1e6):
        low, high = poisson_interval(mean)
        assert low == pytest.approx(mean - 1.96 * math.sqrt(mean), abs=3)
        assert high == pytest.approx(mean + 1.96 * math.sqrt(mean), abs=3)
    assert poisson_interval(0) == (0, 0)


@pytest.mark.proof
@given(st.integers(1, 4000), st.floats(1e-4, 0.02), st.floats(0.01, 30), st.floats(1, 3))
def test_spares_are_monotone(nodes: int, rate: float, days: float, factor: float) -> None:
    few = spare_nodes(nodes, rate, days)
    assert few <= spare_nodes(math.ceil(nodes * factor), rate, days)
    assert few <= spare_nodes(nodes, rate, days * factor)


def test_mtbf() -> None:
    assert mtbf_s(1.0, 1000) == DAY_S
    assert mtbf_s(0.4736, 16384) / 3600 == pytest.approx(3.1, abs=0.05)
