"""The simulation of a run that fails: equal to the closed form where there is one, and sane where there is none."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_goodput import COLUMNS, ROWS, cell

from smalti.base.errors import UserError
from smalti.cost.failures import DAY_S
from smalti.plan.failures import goodput
from smalti.plan.failures.causes import LLAMA_3, Cause, with_times
from smalti.plan.failures.setup import Setup
from smalti.plan.failures.simulate import simulate, summary

SMALL = Setup(3072, detect_s=600, restart_s=900, checkpoint_stall_s=30, days=20)


def of_cell(gpus: int, column: str, failures: int) -> Setup:
    """A run of the published table that is long enough for about so many failures."""
    timing = cell(gpus, column)
    days = failures * timing.mtbf_s / DAY_S
    return Setup(
        gpus,
        detect_s=timing.recoveries[0].detect_s,
        restart_s=timing.recoveries[0].restart_s,
        checkpoint_stall_s=timing.stall_s,
        checkpoint_interval_s=timing.interval_s,
        days=min(days, 36_500.0),
    )


@pytest.mark.slow
def test_the_table_of_goodput_by_simulation(proof: Callable[..., int], record: Callable[..., None]) -> None:
    """Twenty cells, and each with failures during restarts: within 1 % of the closed form."""
    failures, repeats, worst, cells = proof(4000, 20_000), proof(2, 20), 0.0, {}
    for gpus in ROWS:
        for column, *_ in COLUMNS:
            for during in (False, True):
                setup = replace(of_cell(gpus, column, failures), failures_during_restart=during)
                found = summary(simulate(setup, repeats=repeats, seed=gpus)).goodput_frac.mean
                exact = goodput.goodput_frac(setup.timing)
                assert found == pytest.approx(exact, rel=0.01), (gpus, column, during)
                worst = max(worst, abs(found / exact - 1))
                cells[f"{gpus} {column}{' with failures during restart' * during}"] = [found, exact]
    record("plan_simulation", {"goodput_cells": cells, "goodput_worst_relative": worst})


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("upload_s", [0.0, 300.0])
def test_every_share_equals_the_closed_form(during: bool, upload_s: float, proof: Callable[..., int]) -> None:
    causes = with_times({("nccl-watchdog", "detect_s"): 1800.0, ("software-bug", "restart_s"): 7200.0})
    setup = Setup(
        8192, detect_s=200, restart_s=400, checkpoint_stall_s=20, checkpoint_upload_s=upload_s,
        failures_during_restart=during, days=proof(2000, 36_000), causes=causes,
    )  # fmt: skip
    found = summary(simulate(setup, repeats=proof(1, 10), seed=2))
    for name, share in vars(goodput.shares(setup.timing)).items():
        assert found.shares[name.removesuffix("_frac")] == pytest.approx(share, rel=0.04), name
    assert found.shares["wait"] == 0


@pytest.mark.proof
@given(
    st.integers(1, 20_000), st.floats(0, 5e3), st.floats(0, 5e3), st.floats(0, 200), st.floats(300, 5e3),
    st.floats(0, 300), st.booleans(), st.none() | st.integers(0, 5), st.floats(0.5, 2),
)  # fmt: skip
def test_every_second_is_counted_once(
    gpus: int, detect: float, restart: float, stall: float, interval: float, upload: float, during: bool,
    spares: int | None, burst: float,
) -> None:  # fmt: skip
    setup = Setup(
        gpus, detect_s=detect, restart_s=restart, checkpoint_stall_s=stall, checkpoint_interval_s=interval,
        checkpoint_upload_s=upload, failures_during_restart=during, days=3, repair_days=0.5, spares=spares,
    )  # fmt: skip
    for run in simulate(setup, repeats=2, seed=7, burst=burst):
        assert run.useful_s == 3 * 86_400
        assert 0 < run.goodput_frac <= 1
        assert sum(run.lost_s.values()) == pytest.approx(run.redone_s + run.detect_s + run.restart_s + run.wait_s)
        assert min(run.stall_s, run.redone_s, run.detect_s, run.restart_s, run.wait_s) >= 0
        assert (run.wait_s > 0) == (run.waits > 0)


def test_equal_seeds_give_equal_runs() -> None:
    first, again, other = (simulate(SMALL, repeats=3, seed=seed) for seed in (4, 4, 5))
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert simulate(SMALL, repeats=2, seed=4) == first[:2], "a repeat does not depend on how many there are"


def test_without_failures() -> None:
    setup = Setup(512, failures_per_1000_gpu_days=0, checkpoint_stall_s=30, checkpoint_interval_s=600, days=30)
    (run,) = simulate(setup, repeats=1)
    assert run.failures == {}
    assert run.goodput_frac == pytest.approx(600 / 630)


def test_causes_come_as_often_as_counted() -> None:
    found = summary(simulate(replace(SMALL, days=4000.0), repeats=1, seed=1))
    total = sum(found.failures_by_cause.values())
    for cause in LLAMA_3:
        expected = total * cause.n / 419
        assert found.failures_by_cause[cause.name] == pytest.approx(expected, abs=5 * math.sqrt(expected))
    assert next(iter(found.failures_by_cause)) == "faulty-gpu"


@pytest.mark.slow
def test_nodes_in_repair_are_a_poisson_count(proof: Callable[..., int], record: Callable[..., None]) -> None:
    """What failures find in repair has the mean and the P99 of the formula for spares: every failure takes a node."""
    always = (Cause("any", 1, "gpu", True),)
    rows = {}
    for nodes, repair_days in ((64, 7.0), (384, 2.0), (2048, 0.5)):
        setup = Setup(
            8 * nodes, detect_s=0, restart_s=0, checkpoint_stall_s=1, checkpoint_interval_s=3600, causes=always,
            repair_days=repair_days, days=proof(10_000, 36_500),
        )  # fmt: skip
        counts: dict[int, int] = {}
        for run in simulate(setup, repeats=proof(1, 5), seed=3):
            for n, times in run.in_repair.items():
                counts[n] = counts.get(n, 0) + times
        total, mean = sum(counts.values()), nodes * 0.008 * repair_days
        assert sum(n * times for n, times in counts.items()) / total == pytest.approx(mean, rel=0.05)
        enough = goodput.spare_nodes(nodes, 0.008, repair_days)
        covered = sum(times for n, times in counts.items() if n <= enough) / total
        below = sum(times for n, times in counts.items() if n < enough) / total
        assert covered >= 0.99 - 0.004
        assert below < 0.99 + 0.004
        rows[f"{nodes} nodes, {repair_days:g} days"] = {"mean": mean, "p99_nodes": enough, "covered_frac": covered}
    record("plan_simulation", {"spares": rows})


def test_fewer_spares_wait_longer() -> None:
    setup = Setup(3072, days=200, repair_days=2.0, spares=0)
    found = [summary(simulate(replace(setup, spares=n), repeats=4, seed=1)) for n in (0, 3, 6, 12, 40)]
    waits = [one.wait_h.mean for one in found]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 1000
    assert waits[-1] == 0
    assert found[-1].waited_frac == 0
    unlimited = summary(simulate(replace(setup, spares=None), repeats=4, seed=1))
    assert unlimited.goodput_frac == found[-1].goodput_frac
    assert max(one.goodput_frac.mean for one in found) == found[-1].goodput_frac.mean


def test_a_cause_that_keeps_its_node_needs_no_spare() -> None:
    setup = Setup(3072, days=100, repair_days=30.0, spares=0, causes=(Cause("bug", 1, "software", False),))
    assert summary(simulate(setup, repeats=2)).wait_h.mean == 0


def test_one_wait_by_hand() -> None:
    """No spare: each failure waits for the repair of its own node, whatever else happens."""
    setup = Setup(
        8, failures_per_1000_gpu_days=100, detect_s=100, restart_s=50, checkpoint_stall_s=1,
        checkpoint_interval_s=600, days=5, repair_days=0.25, spares=0, causes=(Cause("gpu", 1, "gpu", True),),
    )  # fmt: skip
    (run,) = simulate(setup, repeats=1, seed=3)
    n = run.failures["gpu"]
    assert n > 1
    assert run.waits == n
    assert run.wait_s == pytest.approx(n * 0.25 * 86_400)
    assert run.detect_s == pytest.approx(n * 100)
    assert run.restart_s == pytest.approx(n * 50)


def test_bursts_keep_the_mean_and_widen_the_spread() -> None:
    setup = Setup(3072, detect_s=0, restart_s=0, checkpoint_stall_s=1, checkpoint_interval_s=3600, days=90)
    plain, bursts = (summary(simulate(setup, repeats=200, seed=6, burst=shape)) for shape in (1.0, 0.5))
    assert bursts.failures.mean == pytest.approx(plain.failures.mean, rel=0.05)
    assert bursts.failures.high - bursts.failures.low > 1.5 * (plain.failures.high - plain.failures.low)


@pytest.mark.parametrize(
    ("setup", "options", "text"),
    [
        (replace(SMALL, days=None), {"repeats": 1}, "needs the length of the run"),
        (SMALL, {"repeats": 0}, "repeats=0 is out of range"),
        (SMALL, {"repeats": 10, "burst": 0.0}, "burst=0.0 is out of range"),
        (SMALL, {"repeats": 10, "burst": math.nan}, "burst=nan is out of range"),
        (SMALL, {"repeats": 1_000_000}, "too many to simulate"),
    ],
)
def test_refusals(setup: Setup, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        simulate(setup, **options)
