"""Student's t distribution with any positive number of degrees of freedom, also a fraction or infinity."""

import math
from statistics import NormalDist

_NORMAL = NormalDist()
_NORMAL_DF = 1e8
"""From here on the normal distribution is used: it differs by less than 1e-7 of p, and the fraction loses digits."""


def two_sided_p(t: float, df: float) -> float:
    """Return P(abs(T) >= abs(t)) = I_x(df/2, 1/2) with x = df / (df + t^2) (DLMF 8.17; Abramowitz & Stegun 26.7.1)."""
    if math.isinf(t * t):
        return 0.0
    if df > _NORMAL_DF:
        return 2 * _NORMAL.cdf(-abs(t))
    x, y = df / (df + t * t), t * t / (df + t * t)
    a, b = df / 2, 0.5
    front = math.exp(_log_gamma_ratio(a) - a * math.log1p(t * t / df)) * math.sqrt(y / math.pi)
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, y) / b


def quantile(p: float, df: float) -> float:
    """Return the t with P(T <= t) = p, for p of at least one half, to a relative error of 1e-10."""
    assert 0.5 <= p < 1 and df > 0, f"no quantile of p={p}, df={df}"
    t = _NORMAL.inv_cdf(p)
    if df > _NORMAL_DF or p == 0.5:
        return t
    log_peak = _log_gamma_ratio(df / 2) - math.log(df * math.pi) / 2
    # Newton from the normal quantile, which is below: the tail is convex, so the steps never pass the solution.
    for _ in range(100):
        density = math.exp(log_peak - (df + 1) / 2 * math.log1p(t * t / df))
        step = (two_sided_p(t, df) / 2 - (1 - p)) / density
        t += step
        if abs(step) <= 1e-11 * t:
            break
    return t


def _log_gamma_ratio(a: float) -> float:
    """Return ln(Gamma(a + 1/2) / Gamma(a)), for large a by its series, which loses no digits."""
    if a < 1000:
        return math.lgamma(a + 0.5) - math.lgamma(a)
    return math.log(a) / 2 - 1 / (8 * a) + 1 / (192 * a**3)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's algorithm."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        for coefficient in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + coefficient * d or tiny)
            c = 1 + coefficient / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
