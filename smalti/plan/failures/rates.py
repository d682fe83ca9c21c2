"""Published failure rates of GPUs, by name and with their source.

Every rate is printed in its source, or follows from it by the arithmetic given. A rate counts interruptions of a
job for each 1,000 GPU-days, whatever their cause.
"""

from dataclasses import dataclass

from smalti.base.errors import UserError, nearest


@dataclass(frozen=True)
class FailureRate:
    """A measured rate, with ``low`` and ``high`` where the source gives several figures or a count."""

    name: str
    """Name as typed: ``llama-3``."""
    per_1000_gpu_days: float
    """Interruptions of a job for each 1,000 GPU-days."""
    source: str
    """Description of the measurement, and its publication."""
    low: float | None = None
    """Lower end of the range that the source supports."""
    high: float | None = None
    """Upper end of that range."""


RATES = (
    FailureRate(
        "dbrx", 1.0, "DBRX on 3,072 H100: 'roughly once every 1000 H100-days' (talk on training modern LLMs); the team "
        "also speaks of 3 to 4 a day (roundtable), which is 1.0 to 1.3", 1.0, 4000 / 3072,
    ),
    FailureRate(
        "mosaicml", 1000 / (16 * 8 * 7), "MosaicML's clusters: 1 node in 16 every week (talk on building LLMs); "
        "1000 / (16 x 8 x 7)",
    ),
    FailureRate(
        "llama-3", 419_000 / (16_384 * 54), "Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 "
        "(arXiv 2407.21783); the interval is a Poisson count's", 379_800 / (16_384 * 54), 461_100 / (16_384 * 54),
    ),
    FailureRate("meta-rsc-1", 6.50 / 8, "Meta RSC-1, A100: 6.50 for each 1,000 node-days (arXiv 2410.21680); / 8"),
    FailureRate("meta-rsc-2", 2.34 / 8, "Meta RSC-2, A100: 2.34 for each 1,000 node-days (arXiv 2410.21680); / 8"),
    FailureRate(
        "ft-hsdp", 2.3 / 8, "FT-HSDP: 2.3 interruptions for each 1,000 servers a day (arXiv 2602.00277, read second "
        "hand); / 8. The one interruption in 18 minutes on 100,000 GPUs that it also reports is 0.8", 2.3 / 8, 0.8,
    ),
)  # fmt: skip
"""All named rates."""

SMALL_JOB_GPUS = 1024
SMALL_JOB_MEASURED_H, SMALL_JOB_SCALED_H = 7.9, 28.8
"""Mean time between failures of jobs of 1,024 GPUs on RSC-1: measured, and by 1/N from the cluster's rate."""


def failure_rate(name: str) -> FailureRate:
    """Return the rate of that name. Raises UserError with the nearest name otherwise."""
    rates = {rate.name: rate for rate in RATES}
    if name not in rates:
        close = nearest(name, rates)
        raise UserError(
            f"'{name}' is not a known failure rate",
            allowed=f"a number of failures for each 1,000 GPU-days, or {', '.join(rates)}",
            hint=f"did you mean '{close}'?" if close else None,
        )
    return rates[name]
