"""The record of a measured rate, and the probe that measures it."""

import pytest

from smalti.base.errors import DataError, SmaltiError
from smalti.fleet.measure import measure_matmul
from smalti.plan.hardware import MeasuredRate


def test_measured_rate_round_trip() -> None:
    rate = MeasuredRate("cpu", 2, "bf16", 8.3e11, 1024)
    assert MeasuredRate.from_json(rate.to_json()) == rate


@pytest.mark.parametrize(
    "bad", [{}, [], None, {"device": "cpu"}, {**MeasuredRate("c", 1, "b", 1, 1).to_json(), "flops_per_s": 0}]
)
def test_measured_rate_that_is_none(bad: object) -> None:
    with pytest.raises(DataError, match="rate"):
        MeasuredRate.from_json(bad)


@pytest.mark.slow
def test_probe_as_a_child_process() -> None:
    rate = measure_matmul(threads=1, device="cpu")
    assert (rate.device, rate.threads, rate.dtype) == ("cpu", 1, "bf16")
    assert rate.flops_per_s > 1e8


def test_probe_that_fails_says_why() -> None:
    with pytest.raises(SmaltiError, match="invalid choice"):
        measure_matmul(dtype="fp7")
    with pytest.raises(SmaltiError, match="did not end within"):
        measure_matmul(timeout_s=0.01)
