"""How often a job fails, and the interval between checkpoints that loses the least time: of planner and runs."""

import math

DAY_S = 86_400.0
FAILURES_PER_1000_GPU_DAYS = 1.0
"""As on DBRX's cluster."""


def mtbf_s(failures_per_1000_gpu_days: float, gpus: int) -> float:
    """Return the mean time between failures of a job that ends when any of its nodes fails; infinite at a rate of 0."""
    per_day = failures_per_1000_gpu_days * gpus / 1000
    return DAY_S / per_day if per_day else math.inf


def optimal_s(stall_s: float, mtbf_s: float) -> float:
    """Return the interval of the highest goodput, by bisection: the root of x = 1 - e^(-x - C/M), x = tau / M.

    Detection, restart and upload do not change it. Needs a stall above 0 and a finite MTBF.
    """
    if not (0 < stall_s < math.inf and 0 < mtbf_s < math.inf):
        raise ValueError("the optimal interval exists for a stall above 0 and a finite MTBF only")
    ratio = stall_s / mtbf_s
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle * mtbf_s
        if -math.expm1(-middle - ratio) > middle:
            low = middle
        else:
            high = middle
