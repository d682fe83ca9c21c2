"""The matmul rate that a device reaches, as the peak of MFU where none is published.

All ranks measure at the same time, so that ranks on one machine share it as they do in training. It is no benchmark;
``smalti.fleet.probes.machine`` measures what the planner needs.
"""

import time
from collections.abc import Callable

import torch

from smalti.model.dtypes import DTYPES

_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
_SECONDS_A_SIZE = 0.2


def matmul_rate(device: torch.device, precision: str) -> tuple[float, int]:
    """Return (FLOP/s, size) of the fastest of several square matmuls of 2 n^3 FLOPs; takes about a second."""
    best_rate, best_size = 0.0, 0
    for size in _SIZES[device.type]:
        # Random, not constant: a GPU multiplies ones faster than data, because it needs less power.
        left = torch.randn((size, size), device=device).to(DTYPES[precision])
        # NT, as a linear layer multiplies: the weight is stored transposed.
        right = torch.randn((size, size), device=device).to(DTYPES[precision]).t()
        rate = 2.0 * size**3 / _best_seconds(lambda left=left, right=right: left @ right, device)  # type: ignore[misc]
        if rate > best_rate:
            best_rate, best_size = rate, size
    return best_rate, best_size


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of the repeats that fit into the time for one size, after one to warm up."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    repeats = [timed()]
    while sum(repeats) < _SECONDS_A_SIZE:
        repeats.append(timed())
    return min(repeats)
