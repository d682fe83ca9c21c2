"""The matmul rate that a device reaches: the yardstick of MFU where no datasheet peak is known.

Measured on every rank at the same time, so that ranks sharing a machine share it here as they do in training.
"""

import time

import torch

from smalti.dist.fsdp import DTYPES


def matmul_flops_per_s(device: torch.device, precision: str, *, seconds: float = 0.6) -> float:
    """Best rate (FLOP/s) of square matmuls, 2048 wide on CPU and 8192 on CUDA, over about ``seconds``."""
    size = 8192 if device.type == "cuda" else 2048
    left = torch.randn(size, size, device=device).to(DTYPES[precision])
    right = torch.randn(size, size, device=device).to(DTYPES[precision])
    product = left @ right.T
    best_s, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.matmul(left, right.T, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size**3 / best_s
