"""The axes of charts: ticks at round numbers, the scale from values to pixels, numbers as short text."""

import math
from collections.abc import Sequence


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten) inside [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 2.5, 5, 10), key=lambda m: abs(math.log(m * power / rough)))
    first = math.ceil(low / step - 1e-9)
    values = [first * step + i * step for i in range(int((high - first * step) / step + 1e-9) + 1)]
    return [0.0 if abs(value) < step * 1e-9 else value for value in values]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers inside [low, high] for a logarithmic axis: decades, or finer ones if these are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        stride = max(1, (last - first) // 6) if len(steps) == 1 else 1
        values = [m * 10.0**e for e in range(first, last + 1, stride) for m in steps]
        inside = [value for value in values if low * 0.999 <= value <= high * 1.001]
        if len(inside) >= 4:
            return inside
    return ticks(low, high)


class Scale:
    """Maps values to pixels."""

    def __init__(
        self, values: Sequence[float], begin: float, end: float, *, log: bool = False, loose: bool = False
    ) -> None:
        self.low = min(values)
        self.high = max(values)
        self.log = log
        if self.low == self.high:
            pad = abs(self.low) * 0.1 or 1.0
            self.low, self.high = (self.low / 1.1, self.high * 1.1) if log else (self.low - pad, self.high + pad)
        elif loose:
            step = 1.0 if log else 0.04 * (self.high - self.low)
            self.low, self.high = (
                (self.low / 1.03, self.high * 1.03)
                if log
                else (self.low if self.low == 0 else self.low - step, self.high + step)
            )
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        if self.log:
            low = math.log(self.low)  # differences of logarithms: a ratio of the values may overflow a float
            frac = (math.log(value) - low) / (math.log(self.high) - low)
        else:
            frac = (value - self.low) / (self.high - self.low)
        return self._begin + frac * (self._end - self._begin)

    def ticks(self, count: int) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, count=count)


def percent(value: float) -> str:
    return f"{value * 100:.0f}%"


def short(value: float) -> str:
    """Return a number as about five characters, for an axis: 0, 0.5, 12, 1.5k, 2M, 3e-04, 5e21."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}".replace("e+", "e")
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit * 0.9999:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.4g}{suffix}"
    if 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:.4g}"
