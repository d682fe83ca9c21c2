"""Days, dollars, lost hours and spare nodes of a run that fails; what is refused and what is warned of."""

import math
from dataclasses import replace
from typing import Any

import pytest

from smalti.base.errors import UserError
from smalti.cost.failures import DAY_S
from smalti.plan.failures.causes import LLAMA_3, with_times
from smalti.plan.failures.reliability import goodput_at, goodput_by_rate, outlook, to_json, warnings
from smalti.plan.failures.setup import ASSUMED, NAMES, Setup, setup_of

DBRX = Setup(3072, detect_s=600, restart_s=900, days=75.0, price_usd_per_gpu_hour=3.0)


def test_days_hours_and_dollars_add_up() -> None:
    found = outlook(DBRX)
    assert found.calendar_days == pytest.approx(75 / found.shares.useful_frac)
    assert found.shares.useful_frac == pytest.approx(0.906, abs=5e-4)
    assert found.gpu_hours == pytest.approx(3072 * 24 * (found.calendar_days or 0))
    assert found.cost_usd == pytest.approx(3 * (found.gpu_hours or 0))
    lost = found.lost_gpu_hours
    assert lost is not None
    assert set(lost) == {"stall", "redone", "detect", "restart"}
    assert sum(lost.values()) == pytest.approx((found.gpu_hours or 0) - 3072 * 24 * 75)
    by_cause = found.lost_gpu_hours_by_cause
    assert by_cause is not None
    assert sum(by_cause.values()) == pytest.approx(sum(lost.values()) - lost["stall"])
    assert by_cause["faulty-gpu"] / sum(by_cause.values()) == pytest.approx(148 / 419)


def test_a_slow_cause_loses_more_than_its_share() -> None:
    slow = replace(DBRX, causes=with_times({("nccl-watchdog", "detect_s"): 6000.0}))
    found = outlook(slow).lost_gpu_hours_by_cause
    assert found is not None
    assert found["nccl-watchdog"] > 3 * found["nic"]
    assert found["hbm3"] / found["nic"] == pytest.approx(72 / 7)


def test_expected_failures() -> None:
    found = outlook(replace(DBRX, failures_during_restart=True))
    assert found.failures == pytest.approx(3.072 * (found.calendar_days or 0))
    up_only = outlook(DBRX)
    cycle_days = (up_only.mtbf_s + 1500) / DAY_S
    assert up_only.failures == pytest.approx((up_only.calendar_days or 0) / cycle_days)
    low, high = up_only.failures_interval or (0, 0)
    assert low < (up_only.failures or 0) < high
    least, most = up_only.goodput_interval_frac or (0, 0)
    assert least < up_only.shares.useful_frac < most


def test_the_other_way_round() -> None:
    found, other = outlook(DBRX), outlook(replace(DBRX, failures_during_restart=True))
    assert found.other_goodput_frac == other.shares.useful_frac
    assert other.other_goodput_frac == found.shares.useful_frac
    for one in (to_json(found), to_json(other)):
        assert one["goodput_without_failures_during_restart_frac"] == found.shares.useful_frac
        assert one["goodput_with_failures_during_restart_frac"] == other.shares.useful_frac


@pytest.mark.parametrize(
    ("nodes", "expected"), [(64, (2, 4, 9)), (128, (3, 6, 14)), (384, (5, 13, 33)), (2048, (16, 47, 140))]
)
def test_spares_of_the_table(nodes: int, expected: tuple[int, ...]) -> None:
    found = [outlook(Setup(8 * nodes, repair_days=days)) for days in (0.5, 2.0, 7.0)]
    assert tuple(one.spares_p99_nodes for one in found) == expected
    assert all((one.spares_p99_by_cause_nodes or 0) <= (one.spares_p99_nodes or 0) for one in found)


def test_repair_time_of_one_cause() -> None:
    quick = outlook(Setup(16384, repair_days=7.0))
    slow = outlook(Setup(16384, repair_days=7.0, causes=with_times({("faulty-gpu", "repair_days"): 28.0})))
    assert (slow.spares_p99_by_cause_nodes or 0) > 1.5 * (quick.spares_p99_by_cause_nodes or 0)
    assert slow.spares_p99_nodes == quick.spares_p99_nodes


def test_an_upload_moves_the_interval_no_lower_than_itself() -> None:
    found = outlook(Setup(3072, checkpoint_stall_s=0.1, checkpoint_upload_s=600))
    assert found.interval_s == 600
    assert (found.optimal_s or 0) < 600


def test_what_is_not_given_is_assumed_by_name() -> None:
    assert set(setup_of({"gpus": 8}).assumed) == set(ASSUMED)
    setup = setup_of({"gpus": 8, "detect_s": 10.0})
    assert "detect_s" not in setup.assumed
    assert {name: getattr(setup, name) for name in setup.assumed} == {
        name: ASSUMED[name][0] for name in ASSUMED if name != "detect_s"
    }
    assert set(to_json(outlook(setup))["assumed"]) == set(setup.assumed)
    with pytest.raises(UserError, match="number of GPUs is not given"):
        setup_of({})


def test_llama_3_as_measured() -> None:
    """419 failures in 54 days, more than 90 % effective: within reach at the times that large teams publish."""
    llama = Setup(16_384, 419_000 / (16_384 * 54), detect_s=120, restart_s=180, checkpoint_stall_s=1, days=50.0)
    found = outlook(llama)
    assert found.shares.useful_frac > 0.9
    assert found.mtbf_s / 3600 == pytest.approx(3.1, abs=0.05)
    assert found.failures == pytest.approx(419, rel=0.1)


def test_warnings() -> None:
    assert any("small jobs" in line and "7.9 h" in line for line in warnings(outlook(Setup(512))))
    assert warnings(outlook(Setup(2048))) == []
    assert any("longer than it is up" in one for one in warnings(outlook(Setup(10_000_000, detect_s=1.0))))
    assert any("a checkpoint every " in one for one in warnings(outlook(Setup(4096, checkpoint_interval_s=36_000.0))))
    slow = Setup(3072, detect_s=1800.0, restart_s=1200.0)
    assert any("Llama 3 405B was more than 90% effective" in line for line in warnings(outlook(slow)))
    assert not any("Llama 3 405B" in line for line in warnings(outlook(replace(slow, gpus=16_384))))
    few = warnings(outlook(Setup(4096, spares=1, repair_days=7.0)))
    assert any("1 spares are fewer than the" in line for line in few)
    never = Setup(4096, failures_per_1000_gpu_days=0, checkpoint_interval_s=60.0)
    assert any("no failure" in line for line in warnings(outlook(never)))


def test_goodput_of_other_jobs() -> None:
    assert goodput_at(DBRX, gpus=3072, failures_per_1000_gpu_days=1.0) == outlook(DBRX).shares.useful_frac
    by_rate = goodput_by_rate(DBRX)
    assert by_rate["dbrx"] == outlook(DBRX).shares.useful_frac
    assert by_rate["ft-hsdp"] > by_rate["llama-3"] > by_rate["mosaicml"]
    assert goodput_by_rate(replace(DBRX, repair_days=600.0, failures_per_1000_gpu_days=0.1))


def test_json_is_finite_and_complete() -> None:
    never = Setup(512, failures_per_1000_gpu_days=0, checkpoint_interval_s=60.0, days=10.0)
    for setup in (DBRX, never, Setup(8)):
        value = to_json(outlook(setup))
        assert set(NAMES) <= set(value)
        flat = [one for one in value.values() if isinstance(one, float)]
        assert all(map(math.isfinite, flat))
    assert to_json(outlook(never))["mtbf_s"] is None
    assert to_json(outlook(never))["goodput_frac"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"gpus": 0}, "gpus=0 is not valid"),
        ({"gpus": -8}, "gpus=-8 is not valid"),
        ({"gpus": 1e30}, "gpus=1e\\+30 is not valid"),
        ({"gpus": 8.5}, "gpus=8.5 is not valid"),
        ({"gpus": True}, "gpus=True is not valid"),
        ({"gpus_per_node": 0}, "gpus_per_node=0 is not valid"),
        ({"detect_s": math.nan}, "detect_s=nan is not valid"),
        ({"restart_s": math.inf}, "restart_s=inf is not valid"),
        ({"restart_s": -1.0}, "restart_s=-1.0 is not valid"),
        ({"failures_per_1000_gpu_days": 1e9}, "is not valid"),
        ({"days": 0}, "days=0 is not valid"),
        ({"checkpoint_interval_s": 0}, "checkpoint_interval_s=0 is not valid"),
        ({"failures_per_1000_gpu_days": 0}, "has no optimal checkpoint interval"),
        ({"checkpoint_stall_s": 0}, "has no optimal checkpoint interval"),
        ({"checkpoint_interval_s": 60.0, "checkpoint_upload_s": 61.0}, "would pile up"),
        ({"price_usd_per_gpu_hour": 3.0}, "no effect without days"),
        ({"spares": 3}, "no effect without repair_days"),
        ({"repair_days": 200.0}, "nodes in repair for each one that works"),
        ({"causes": with_times({("nic", "repair_days"): 2.0})}, "needs that of the others"),
        ({"causes": with_times({("nic", "detect_s"): math.inf})}, "detect_s.nic=inf is not valid"),
    ],
)
def test_refusals(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Setup(**{"gpus": 3072, **given})


def test_a_hopeless_job_is_refused() -> None:
    with pytest.raises(UserError, match="makes no progress"):
        outlook(Setup(1_000_000, checkpoint_interval_s=86_400.0))


def test_the_causes_are_the_default_mix() -> None:
    assert Setup(8).causes is LLAMA_3
