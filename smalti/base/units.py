"""Formats numbers as text: counts, bytes, seconds. Files and metrics have plain numbers; only output is rounded."""

import math

_COUNT_SUFFIXES = ("", "k", "M", "B", "T", "P", "E", "Z", "Y")
_BYTE_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_count(value: float) -> str:
    """Return a count with three digits and a decimal suffix: 1234567 -> '1.23M', 999999 -> '1M'."""
    if not math.isfinite(value):
        return str(value)
    amount, step = float(value), 0
    # Compared after rounding to three digits, so that 999,999 is 1M and not 1e+03k.
    while abs(_three_digits(amount)) >= 1000 and step < len(_COUNT_SUFFIXES) - 1:
        amount, step = amount / 1000, step + 1
    rounded = _three_digits(amount)
    text = f"{rounded:.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"
    return text + _COUNT_SUFFIXES[step]


def format_quantity(n: int, noun: str) -> str:
    """Return a number with its noun: 1, 'document' -> '1 document'; 1200 -> '1,200 documents'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_flops(value: float) -> str:
    """Return a number of FLOPs as text: 8.3e11 -> '830 GFLOP'. Append '/s' for a rate."""
    text = format_count(value)
    digits = text.rstrip("kMBTPEZY")
    suffix = {"B": "G", "": ""}.get(text[len(digits) :], text[len(digits) :])
    return f"{digits} {suffix}FLOP"


def format_bytes(value: float) -> str:
    """Return a size with a binary suffix: 1536 -> '1.5 KiB'."""
    if not math.isfinite(value):
        return f"{value} B"
    amount, step = float(value), 0
    while abs(round(amount, 1)) >= 1024 and step < len(_BYTE_SUFFIXES) - 1:
        amount, step = amount / 1024, step + 1
    return f"{amount:.0f} B" if step == 0 else f"{amount:.1f} {_BYTE_SUFFIXES[step]}"


def format_byte_rate(value: float) -> str:
    """Return a rate with a decimal suffix, as in the specifications of links and memory: 3.35e12 -> '3.35 TB/s'."""
    return format_flops(value).replace("FLOP", "B") + "/s"


def format_seconds(value: float) -> str:
    """Return a duration as text: 75 -> '1m15s', 0.0123 -> '12.3ms'."""
    if not math.isfinite(value):
        return str(value)
    if value < 0:
        return "-" + format_seconds(-value)
    if value == 0:
        return "0s"
    if _three_digits(value * 1e3) < 1000:
        return f"{value * 1e3:.3g}ms"
    if round(value, 1) < 60:
        return f"{value:.1f}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def format_frac(value: float) -> str:
    """Return a fraction as a percentage: 0.1234 -> '12.3%'. Only output has percentages."""
    return f"{value * 100:.1f}%"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
