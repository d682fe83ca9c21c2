"""Numbers as text: the right suffix at every boundary, and few digits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.units import format_byte_rate, format_bytes, format_count, format_flops, format_frac, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.5"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1k"),
        (1000, "1k"),
        (1234567, "1.23M"),
        (999_999, "1M"),
        (131.6e9, "132B"),
        (4e12, "4T"),
        (2.5e15, "2.5P"),
        (3e24, "3Y"),
        (5e28, "50000Y"),
        (-1500, "-1.5k"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.3e11, "830 GFLOP"), (989e12, "989 TFLOP"), (500, "500 FLOP"), (1e21, "1 ZFLOP"), (2e6, "2 MFLOP")],
)
def test_flops(value: float, text: str) -> None:
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (80e9, "74.5 GiB"),
        (3 * 2**60, "3072.0 PiB"),
        (-2048, "-2.0 KiB"),
        (math.inf, "inf B"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0s"),
        (0.0123, "12.3ms"),
        (5e-7, "0.0005ms"),
        (0.9994, "999ms"),
        (0.9996, "1.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (75, "1m15s"),
        (3599.6, "1h00m"),
        (7260, "2h01m"),
        (90_000, "1d01h"),
        (-75, "-1m15s"),
        (math.inf, "inf"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_percent_exist_only_in_print() -> None:
    assert format_frac(0.1234) == "12.3%"


@given(st.floats(0, 1e27))
def test_counts_are_short_and_near(value: float) -> None:
    text = format_count(value)
    assert len(text) <= 9
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBTPEZY")) * scale == pytest.approx(value, rel=6e-3)


@given(st.floats(0, 1e9))
def test_seconds_never_show_sixty(value: float) -> None:
    text = format_seconds(value)
    assert not text.startswith(("60.0s", "1e+03"))
    assert "60s" not in text.removesuffix(".0s") or "m" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(3.35e12, "3.35 TB/s"), (450e9, "450 GB/s"), (31.5e9, "31.5 GB/s"), (12.0, "12 B/s")]
)
def test_format_byte_rate(value: float, text: str) -> None:
    assert format_byte_rate(value) == text
