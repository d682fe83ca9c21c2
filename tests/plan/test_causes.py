"""Llama 3's table of causes, and the rates that others measured: the figures as they are printed."""

import pytest

from smalti.base.errors import UserError
from smalti.cost.failures import mtbf_s
from smalti.plan.failures.causes import DAYS, GPUS, LLAMA_3, PLANNED, UNEXPECTED, node_loss_frac, recoveries, with_times
from smalti.plan.failures.rates import RATES, SMALL_JOB_GPUS, SMALL_JOB_SCALED_H, failure_rate

PRINTED = {
    "faulty-gpu": 30.1, "hbm3": 17.2, "software-bug": 12.9, "switch-or-cable": 8.4, "host-maintenance": 7.6,
    "gpu-sram": 4.5, "gpu-system-processor": 4.1, "nic": 1.7, "nccl-watchdog": 1.7, "silent-corruption": 1.4,
    "thermal": 1.4,
}  # fmt: skip
"""Percent as table 5 of the paper has them."""


def test_the_counts_add_up() -> None:
    assert sum(cause.n for cause in LLAMA_3) == UNEXPECTED == 419
    assert UNEXPECTED + PLANNED == 466
    assert len({cause.name for cause in LLAMA_3}) == len(LLAMA_3)


def test_percentages_as_printed_but_for_the_misprint() -> None:
    found = {cause.name: round(100 * cause.n / UNEXPECTED, 1) for cause in LLAMA_3}
    assert found.pop("faulty-gpu") == 35.3, "the paper prints 30.1"
    assert {name: found[name] for name in PRINTED if name in found} == {
        name: value for name, value in PRINTED.items() if name != "faulty-gpu"
    }


def test_the_sum_of_the_printed_percentages_shows_the_misprint() -> None:
    rest = sum(100 * cause.n / UNEXPECTED for cause in LLAMA_3 if cause.name not in PRINTED)
    assert sum(PRINTED.values()) + rest == pytest.approx(94.8, abs=0.2)
    gpu = sum(cause.n for cause in LLAMA_3 if cause.kind == "gpu")
    assert round(100 * gpu / UNEXPECTED, 1) == 64.0, "the text prints 58.7"
    assert round(100 * (gpu - 148 + 126) / UNEXPECTED, 1) == 58.7
    assert round(100 * 126 / UNEXPECTED, 1) == 30.1


def test_rates_as_printed() -> None:
    found = {rate.name: rate.per_1000_gpu_days for rate in RATES}
    printed = {"dbrx": 1.0, "mosaicml": 1.1, "llama-3": 0.47, "meta-rsc-1": 0.81, "meta-rsc-2": 0.29, "ft-hsdp": 0.29}
    assert set(found) == set(printed)
    for name, value in printed.items():
        assert found[name] == pytest.approx(value, abs=0.02 if name == "mosaicml" else 0.005), name
    for rate in RATES:
        assert (rate.low or 0) <= rate.per_1000_gpu_days <= (rate.high or 10)


def test_mean_times_that_the_sources_print_beside_the_rates() -> None:
    assert mtbf_s(failure_rate("llama-3").per_1000_gpu_days, GPUS) / 3600 == pytest.approx(3.1, abs=0.05)
    assert pytest.approx(3.1, abs=0.05) == DAYS * 24 / UNEXPECTED
    rsc = failure_rate("meta-rsc-1").per_1000_gpu_days
    assert mtbf_s(rsc, 16_384) / 3600 == pytest.approx(1.8, abs=0.05)
    assert mtbf_s(rsc, 131_072) / 3600 == pytest.approx(0.23, abs=0.005)
    assert mtbf_s(rsc, SMALL_JOB_GPUS) / 3600 == pytest.approx(SMALL_JOB_SCALED_H, abs=0.05)
    assert mtbf_s(failure_rate("ft-hsdp").per_1000_gpu_days, 100_000) / 60 == pytest.approx(50, abs=1)
    assert mtbf_s(failure_rate("ft-hsdp").high or 0, 100_000) / 60 == pytest.approx(18)
    low, high = (n / 3.072 for n in (3, 4))
    assert low == pytest.approx(1.0, abs=0.03)
    assert high == pytest.approx(1.3, abs=0.01)


def test_times_of_one_cause() -> None:
    causes = with_times({("nic", "detect_s"): 600.0, ("nic", "repair_days"): 1.0, ("hbm3", "restart_s"): 5.0})
    found = {cause.name: cause for cause in causes}
    assert (found["nic"].detect_s, found["nic"].restart_s, found["nic"].repair_days) == (600.0, None, 1.0)
    ways = recoveries(causes, 10.0, 20.0)
    assert sum(one.frac for one in ways) == pytest.approx(1)
    times = {cause.name: (one.detect_s, one.restart_s) for cause, one in zip(causes, ways, strict=True)}
    assert times["nic"] == (600.0, 20.0)
    assert times["hbm3"] == (10.0, 5.0)
    assert times["cpu"] == (10.0, 20.0)


def test_share_that_takes_the_node() -> None:
    assert node_loss_frac(LLAMA_3) == pytest.approx((419 - 54 - 7 - 2) / 419)


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="'nik' is not a known cause") as caught:
        with_times({("nik", "detect_s"): 1.0})
    assert caught.value.hint == "did you mean 'nic'?"
    with pytest.raises(UserError, match="'lama-3' is not a known failure rate") as caught:
        failure_rate("lama-3")
    assert "llama-3" in str(caught.value.hint)
