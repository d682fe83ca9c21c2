"""Products of matrices on each device of a node, with their speed and their values.

Entries are small integers, so every product is exact in fp32 and, where its entries stay below 256, in bf16. Values are
tested with Freivalds' check (R. Freivalds, *Probabilistic machines can use less running time*, 1977): for a vector x
of random signs A(Bx) must equal (AB)x, computed in float64; a wrong row passes 20 vectors with a probability of at
most 1e-6.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIDES = {"cpu": 768, "cuda": 8192}
_WINDOWS, _WINDOW_S = 4, 0.12
"""The speed is the median of all windows but the first; each is longer than the period of a cgroup's CPU quota (0.1 s).
In the first one a node with a quota is faster, by what it has not used before."""
_VECTORS = 20


@dataclass(frozen=True)
class Operands:
    """Two square matrices of small integers, and what their product with vectors of random signs is."""

    left: np.ndarray
    right: np.ndarray
    signs: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, left: np.ndarray, right: np.ndarray) -> "Operands":
        """Return the operands of two matrices, with the expected products."""
        signs = np.random.default_rng(1).choice((-1.0, 1.0), size=(right.shape[1], _VECTORS))
        return cls(left, right, signs, left.astype(np.float64) @ (right.astype(np.float64) @ signs))

    def wrong_rows(self, result: Tensor) -> int:
        """Return the number of rows of ``result`` [side, side] that differ from ``left @ right``."""
        computed = result.to(device="cpu", dtype=torch.float64).numpy() @ self.signs
        return int((self.expected != computed).any(axis=1).sum())


def operands(side: int | None = None) -> Operands:
    """Return random operands of a ``side``, by default one that suits the devices of this node."""
    side = side or _SIDES["cuda" if torch.cuda.is_available() else "cpu"]
    random = np.random.default_rng(0)
    # sums have a mean of side / 256 and a standard deviation of 3/16 sqrt(side): 32 and 17 for 8,192, far below 256
    left, right = (_signs(random, side) for _ in range(2))
    return Operands.of(left, right)


def measure_products(of: Operands) -> list[dict[str, Any]]:
    """Return for each device and dtype ``flops_per_s``, the slowest so far, and ``wrong``, the number of rows with a
    wrong value."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    return [product(device, name, of) for device in devices for name in DTYPES]


def product(device: torch.device, name: str, of: Operands) -> dict[str, Any]:
    """Return speed and wrong rows of the product on one device."""
    on_device = [torch.from_numpy(matrix).to(device=device, dtype=DTYPES[name]) for matrix in (of.left, of.right)]
    result, times = on_device[0] @ on_device[1], []
    for _ in range(_WINDOWS):
        began_s, count = time.perf_counter(), 0
        while (took_s := time.perf_counter() - began_s) < _WINDOW_S:
            result = on_device[0] @ on_device[1]
            _wait(device)
            count += 1
        times.append(took_s / count)
    flops_per_s = 2 * len(of.left) ** 3 / sorted(times[1:])[(_WINDOWS - 1) // 2]
    return {
        "device": str(device),
        "dtype": name,
        "flops_per_s": flops_per_s,
        "slowest_flops_per_s": flops_per_s,
        "wrong": of.wrong_rows(result),
    }


def _signs(random: np.random.Generator, side: int) -> np.ndarray:
    values = np.zeros(16, dtype=np.float32)
    values[:3] = (1, -1, 1)
    return random.choice(values, size=(side, side)).astype(np.float32)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
