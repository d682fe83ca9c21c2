"""Products of matrices on each device of a node, with their speed and their values.

Entries are small integers, so every product is exact in fp32 and, where its entries stay below 256, in bf16. Values are
tested with Freivalds' check (R. Freivalds, *Probabilistic machines can use less running time*, 1977): for a vector x
of random signs A(Bx) must equal (AB)x, computed in float64; a wrong row passes 20 vectors with a probability of at
most 1e-6.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIDES = {"cpu": 768, "cuda": 8192}
_WINDOWS, _WINDOW_S = 9, 0.12
"""The speed is that of the third fastest of so many windows, so that other work of a moment does not count; each is
longer than the period of a cgroup's CPU quota (0.1 s)."""
_VECTORS = 20


def measure_products() -> list[dict[str, Any]]:
    """Return for each device and dtype ``flops_per_s`` and ``wrong``, the number of rows with a wrong value."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    return [product(device, name, _SIDES[device.type]) for device in devices for name in DTYPES]


def product(device: torch.device, name: str, side: int) -> dict[str, Any]:
    """Return speed and wrong rows of a product of two square matrices of ``side``."""
    random = np.random.default_rng(0)
    # sums have a mean of side / 256 and a standard deviation of 3/16 sqrt(side): 32 and 17 for 8,192, far below 256
    left, right = (_signs(random, side) for _ in range(2))
    on_device = [torch.from_numpy(matrix).to(device=device, dtype=DTYPES[name]) for matrix in (left, right)]
    result, times = on_device[0] @ on_device[1], []
    for _ in range(_WINDOWS):
        began_s, count = time.perf_counter(), 0
        while (took_s := time.perf_counter() - began_s) < _WINDOW_S:
            result = on_device[0] @ on_device[1]
            _wait(device)
            count += 1
        times.append(took_s / count)
    return {
        "device": str(device),
        "dtype": name,
        "flops_per_s": 2 * side**3 / sorted(times)[2],
        "wrong": wrong_rows(left, right, result),
    }


def wrong_rows(left: np.ndarray, right: np.ndarray, result: Tensor) -> int:
    """Return the number of rows of ``result`` [side, side] that differ from ``left @ right``; all must be integers."""
    signs = np.random.default_rng(1).choice((-1.0, 1.0), size=(right.shape[1], _VECTORS))
    expected = left.astype(np.float64) @ (right.astype(np.float64) @ signs)
    computed = result.to(device="cpu", dtype=torch.float64).numpy() @ signs
    return int((expected != computed).any(axis=1).sum())


def _signs(random: np.random.Generator, side: int) -> np.ndarray:
    values = np.zeros(16, dtype=np.float32)
    values[:3] = (1, -1, 1)
    return random.choice(values, size=(side, side)).astype(np.float32)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
