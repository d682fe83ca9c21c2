"""Student's t: against the published table, closed forms and an integration of its density."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.evals.statistics.student import quantile, two_sided_p


@pytest.mark.parametrize(
    ("p", "df", "t"),
    # Fisher & Yates 1963, table III (three decimals).
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.95, 9, 1.833), (0.995, 30, 2.750), (0.8, 4, 0.941)],
)
def test_quantiles_of_the_published_table(p: float, df: float, t: float) -> None:
    assert quantile(p, df) == pytest.approx(t, abs=5.1e-4)


def test_closed_forms() -> None:
    for p in (0.6, 0.9, 0.975, 0.999):
        assert quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)  # Cauchy
        assert quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)
    assert quantile(0.975, math.inf) == pytest.approx(1.959963984540054)
    assert quantile(0.5, 3) == 0


@pytest.mark.parametrize("df", [1.5, 7.3, 200, 5000.5])
def test_p_is_the_integral_of_the_density(df: float) -> None:
    x = np.linspace(0, 3, 200_001)
    density = (1 + x * x / df) ** (-(df + 1) / 2)
    norm = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    inside = 2 * norm * float(((density[1:] + density[:-1]) / 2).sum()) * (x[1] - x[0])
    assert two_sided_p(3, df) == pytest.approx(1 - inside, rel=1e-6)


@pytest.mark.proof
@given(st.floats(0.51, 0.9999), st.floats(0.3, 1e6))
def test_quantile_inverts_p(p: float, df: float) -> None:
    assert two_sided_p(quantile(p, df), df) == pytest.approx(2 * (1 - p), rel=1e-8)


def test_ends() -> None:
    assert two_sided_p(0, 4) == 1
    assert two_sided_p(math.inf, 4) == two_sided_p(1e200, 4) == 0
    assert two_sided_p(-2, 7) == two_sided_p(2, 7)
    assert two_sided_p(1.96, 1e12) == pytest.approx(two_sided_p(1.96, math.inf), rel=1e-6)
