"""A synthetic measured machine: matrix products at a rate that rises with their size, kernels at a bandwidth."""

import itertools
from typing import Any

from smalti.config.hardware import Hardware
from smalti.cost.step_time.work import KINDS

SIDES = (64, 256, 1024, 4096)


def product_rate(m: float, k: float, n: float, *, peak: float) -> float:
    """Half of the peak where the sides' product is 64^3."""
    return peak / (1 + 64**3 / (m * k * n))


def kernel_s(elements: float, values: float) -> float:
    """20 GB/s and 4 microseconds."""
    return 4e-6 + elements * values * 4 / 20e9


def values(**measured: Any) -> dict[str, Any]:
    """What its file says."""
    formats = {"bf16": 4e11, "fp32": 1e11}
    grid = [sides for sides in itertools.product(SIDES, repeat=3) if sides[0] * sides[1] * sides[2] <= 2**32]
    table = {
        name: [[n, kernel_s(n, kind.values + kind.fp32_values)] for n in (2**12, 2**16, 2**20, 2**22)]
        for name, kind in KINDS.items()
    }
    return {
        "name": "this-machine",
        "title": "A synthetic CPU",
        "kind": "cpu",
        "peak_flops_per_s": {"bf16": 4e11, "fp32": 1e11},
        "memory_bytes": 16e9,
        "memory_bytes_per_s": 20e9,
        "sources": dict.fromkeys(("peak_flops_per_s", "memory_bytes", "memory_bytes_per_s"), "made up"),
        "measured": {
            "date": "2026-11-22",
            "software": "none",
            "threads": 2,
            "matmul": {
                name: {
                    operands: [[*sides, product_rate(*sides, peak=peak)] for sides in grid]
                    for operands in ("nt", "nn", "tn")
                }
                for name, peak in formats.items()
            },
            "attention": {
                name: [
                    [tokens, width, 2 * tokens**2 * width / peak, 5 * tokens**2 * width / peak]
                    for tokens in (128, 512, 2048)
                    for width in (32, 128)
                ]
                for name, peak in formats.items()
            },
            "kernels": dict.fromkeys(formats, table),
            "collective": {"ranks": 2, "latency_s": 2e-4, "bytes_per_s": 1e9},
            **measured,
        },
    }


def machine(**measured: Any) -> Hardware:
    """The machine, with changes to its section ``measured``."""
    return Hardware.model_validate(values(**measured))
