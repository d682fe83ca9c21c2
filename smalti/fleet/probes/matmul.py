"""How fast this machine multiplies matrices: ``python -m smalti.fleet.probes.matmul --threads 2 --dtype bf16``.

Prints one JSON object ``{device, threads, dtype, flops_per_s, size}`` and nothing else. Best of several square
matmuls over a few sizes, about a second of work after torch is imported. It is a yardstick for the planner and for
MFU on devices without a published peak, no benchmark.
"""

import argparse
import json
import time
from collections.abc import Callable

_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
_SECONDS_A_SIZE = 0.35
_LEAST_REPEATS = 3


def main() -> None:
    """Measure as the arguments say, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.threads, arguments.dtype, arguments.device)))


def measure(threads: int, dtype: str, device: str) -> dict[str, object]:
    """The best rate over the sizes; FLOPs of a product of two n x n matrices are 2 n^3."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if threads > 0:
        torch.set_num_threads(threads)
    number_format = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    best_rate, best_size = 0.0, 0
    for size in _SIZES[device]:
        # Random, not constant: a GPU multiplies ones faster than it multiplies data, for want of power.
        left = torch.randn((size, size), device=device).to(number_format)
        # NT, as a linear layer multiplies: the weight is stored transposed.
        right = torch.randn((size, size), device=device).to(number_format).t()
        seconds = _best_seconds(lambda left=left, right=right: torch.matmul(left, right), synchronize)  # type: ignore[misc]
        rate = 2.0 * size**3 / seconds
        if rate > best_rate:
            best_rate, best_size = rate, size
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "flops_per_s": best_rate,
        "size": best_size,
    }


def _best_seconds(work: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Shortest of the repeats that fit into the time for one size, after one to warm up."""
    work()
    synchronize()
    best, repeats, begin = float("inf"), 0, time.perf_counter()
    while repeats < _LEAST_REPEATS or time.perf_counter() - begin < _SECONDS_A_SIZE:
        start = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - start)
        repeats += 1
    return best


if __name__ == "__main__":
    main()
