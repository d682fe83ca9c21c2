"""Published fits of the loss law L(N, D) = E + A / N^alpha + B / D^beta, by name, with their errors.

Each fit has its printed constants, their source, the range of its runs, and the covariance for intervals. The constants
in the text of Hoffmann et al. are rounded so far that they give another optimum: ``hoffmann-2022-rounded``. A fit on
one's own runs is another ``Fit``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from smalti.base.errors import UserError, nearest

Interval = tuple[float, float]

LEVEL = 0.8
"""Share of an interval: 10th to 90th percentile, as both papers print it."""
DEVIATIONS = 1.2815515655446004
"""Standard deviations to the 90th percentile."""


@dataclass(frozen=True)
class Fit:
    """Constants of the law, with their errors and the range of the runs behind them; losses are nats per token."""

    name: str
    source: str
    """Paper and table."""
    E: float
    """Irreducible loss."""
    A: float
    B: float
    alpha: float
    beta: float
    covariance: tuple[tuple[float, ...], ...] | None
    """Covariance of (log A, log B, log E, alpha, beta); None: not published."""
    interval_source: str
    """Source of ``covariance``, or why there is none."""
    params_range: Interval
    """Smallest and largest model of the runs behind it."""
    tokens_range: Interval

    def __post_init__(self) -> None:
        values = (self.E, self.A, self.B, self.alpha, self.beta)
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise UserError(
                f"the fit '{self.name}' has E={self.E}, A={self.A}, B={self.B}, alpha={self.alpha}, beta={self.beta}",
                allowed="five finite numbers above 0",
            )

    def moved(self, step: tuple[float, ...]) -> "Fit":
        """Return the fit with (log A, log B, log E, alpha, beta) moved by ``step``."""
        return replace(
            self,
            A=self.A * math.exp(step[0]),
            B=self.B * math.exp(step[1]),
            E=self.E * math.exp(step[2]),
            alpha=self.alpha + step[3],
            beta=self.beta + step[4],
        )

    @property
    def deviations(self) -> tuple[tuple["Fit", "Fit"], ...]:
        """Pairs of fits, one standard deviation down and up along independent directions; empty without a covariance.

        The directions are the columns of the Cholesky factor of the covariance.
        """
        if self.covariance is None:
            return ()
        columns = zip(*_cholesky(self.covariance), strict=True)
        return tuple((self.moved(tuple(-step for step in column)), self.moved(column)) for column in columns)


_BOOTSTRAP = (
    (6.513037280e-02, -2.717506526e-02, 2.094733485e-03, 3.882659563e-03, -1.360652675e-03),
    (-2.717506526e-02, 1.697245660e-01, 3.412689929e-03, -1.687937436e-03, 8.302587643e-03),
    (2.094733485e-03, 3.412689929e-03, 1.918409762e-04, 1.236653555e-04, 1.663352964e-04),
    (3.882659563e-03, -1.687937436e-03, 1.236653555e-04, 2.317742257e-04, -8.457557164e-05),
    (-1.360652675e-03, 8.302587643e-03, 1.663352964e-04, -8.457557164e-05, 4.064207795e-04),
)
"""Covariance of (log A, log B, log E, alpha, beta) over 20,000 bootstrap samples of the 240 runs that Besiroglu et al.
extracted from Hoffmann et al.'s figure 4 and kept, each fitted as in the paper (sum of Huber losses of the logarithm,
delta 1e-3). The paper prints only the standard errors, from 4,000 samples; a test compares."""

BESIROGLU = Fit(
    name="besiroglu-2024",
    source="Besiroglu et al. 2024, Chinchilla Scaling: A replication attempt (arXiv 2404.10102), table 1",
    E=1.8172,
    A=482.01,
    B=2085.43,
    alpha=0.3478,
    beta=0.3658,
    covariance=_BOOTSTRAP,
    interval_source="bootstrap over the 240 runs of the fit, to first order",
    params_range=(57e6, 16.2e9),
    tokens_range=(0.8e9, 318e9),
)

HOFFMANN = Fit(
    name="hoffmann-2022",
    source="Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, constants of the TeX source (Besiroglu et al. 2024)",
    E=math.exp(0.5267228),
    A=math.exp(6.0073404),
    B=math.exp(6.0179186),
    alpha=0.33917084,
    beta=0.2849083,
    covariance=_BOOTSTRAP,
    interval_source="errors of Besiroglu et al.'s fit to the same runs, around these constants; the paper's own "
    "interval of the exponent (0.454 to 0.455) would take 600,000 runs and does not hold its own value (0.4565)",
    params_range=(70e6, 16e9),
    tokens_range=(5e9, 500e9),
)

_ROUNDED = "constants rounded to two digits, whose error is not published"

FITS: Mapping[str, Fit] = {
    fit.name: fit
    for fit in (
        BESIROGLU,
        HOFFMANN,
        replace(
            HOFFMANN,
            name="hoffmann-2022-rounded",
            source="Hoffmann et al. 2022 (arXiv 2203.15556), equation 10: rounded, biased; only to compare",
            E=1.69,
            A=406.4,
            B=410.7,
            alpha=0.34,
            beta=0.28,
            covariance=None,
            interval_source=_ROUNDED,
        ),
        replace(
            HOFFMANN,
            name="sardana-2024",
            source="constants of Sardana & Frankle's code for Chinchilla (arXiv 2401.00448, README)",
            E=1.69,
            A=406.4,
            B=410.7,
            alpha=0.336,
            beta=0.283,
            covariance=None,
            interval_source=_ROUNDED,
        ),
        Fit(
            name="muennighoff-2023",
            source="Muennighoff et al. 2023 (arXiv 2305.16264), appendix A: runs on C4, alpha held equal to beta",
            E=math.exp(0.6254804),
            A=math.exp(6.255414),
            B=math.exp(7.3049974),
            alpha=0.3526596,
            beta=0.3526596,
            covariance=None,
            interval_source="no errors are published",
            params_range=(7e6, 9e9),
            tokens_range=(100e6, 900e9),
        ),
    )
}
"""Every named fit; the first is the default."""

DEFAULT = BESIROGLU.name


def fit_named(name: str) -> Fit:
    """Return the fit of that name. Raises UserError with the nearest name otherwise."""
    if name not in FITS:
        close = nearest(name, FITS)
        raise UserError(
            f"'{name}' is not a fit of the loss law",
            allowed=", ".join(FITS),
            hint=f"did you mean '{close}'?" if close else f"leave it out for {DEFAULT}",
        )
    return FITS[name]


def spread(fit: Fit, values: Callable[[Fit], Mapping[str, float]]) -> dict[str, Interval | None]:
    """Return ``LEVEL`` intervals of positive quantities computed from a fit; None where the fit has no errors.

    First order in the logarithm of each quantity: the half width is the root of the summed squared changes by one
    standard deviation along each direction. Without a value on one side (a loss below the moved fit's floor) there is
    no interval.
    """
    centre = values(fit)
    if not fit.deviations:
        return dict.fromkeys(centre)
    squares = dict.fromkeys(centre, 0.0)
    for low, high in fit.deviations:
        try:
            below, above = values(low), values(high)
        except UserError:
            return dict.fromkeys(centre)
        for name in squares:
            squares[name] += (0.5 * (math.log(above[name]) - math.log(below[name]))) ** 2
    return {name: around(value, DEVIATIONS * math.sqrt(squares[name])) for name, value in centre.items()}


def around(value: float, half_width: float) -> Interval:
    """Return ``value`` divided and multiplied by the exponential of ``half_width``."""
    return value * math.exp(-half_width), value * math.exp(half_width)


def _cholesky(matrix: tuple[tuple[float, ...], ...]) -> list[list[float]]:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    return lower
