"""Measures one GPU of this machine: ``python -m smalti.fleet.probes.gpu``.

Prints one JSON object: name, memory, FLOP/s of large square products by format and bytes/s of a large copy; or
``problem``, where PyTorch sees no GPU. Each is the best repeat of the best size. Not run on a GPU yet: the test runs
the same code on a CPU.
"""

import json
from datetime import UTC, datetime
from typing import Any

import torch

from smalti.fleet.probes.machine import DTYPES, random, seconds

SIDES = (4096, 8192, 16384)
COPIED_BYTES = 2**31


def main() -> None:
    """Measure the current device, print JSON."""
    if not torch.cuda.is_available():
        print(json.dumps({"problem": f"PyTorch {torch.__version__} sees no GPU here"}))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    about = torch.cuda.get_device_properties(device)
    kind = "rocm" if torch.version.hip else "cuda"
    print(json.dumps({"name": about.name, "kind": kind, "memory_bytes": about.total_memory, **measure(device)}))


def measure(device: torch.device, sides: tuple[int, ...] = SIDES, copied_bytes: int = COPIED_BYTES) -> dict[str, Any]:
    """Measure products and a copy."""
    peaks = {name: max(_product(side, dtype, device) for side in sides) for name, dtype in DTYPES.items()}
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "software": f"torch {torch.__version__}",
        "peak_flops_per_s": peaks,
        "memory_bytes_per_s": 2 * copied_bytes / copy_s,
    }


def _product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = random((side, side), device, dtype), random((side, side), device, dtype)
    return 2 * side**3 / seconds(lambda: left @ right, device)


if __name__ == "__main__":
    main()
