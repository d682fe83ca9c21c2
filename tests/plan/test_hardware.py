"""Peaks: device names as drivers report them; an unknown device has none."""

import pytest

from smalti.base.errors import DataError, SmaltiError
from smalti.fleet.measure import measure_matmul
from smalti.plan.hardware import PEAKS, MeasuredRate, known_peak, peak_named


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H20", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_names_of_drivers(device: str, name: str | None) -> None:
    peak = known_peak(device)
    assert (peak.name if peak else None) == name


def test_names_of_people_and_sources() -> None:
    for peak in PEAKS:
        assert peak_named(peak.name.lower()) is peak
        assert peak.source
        assert 5e13 < peak.bf16_flops_per_s < 5e15
    assert peak_named("H100").name == "H100 SXM"  # type: ignore[union-attr]
    assert peak_named("TPU") is None


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
