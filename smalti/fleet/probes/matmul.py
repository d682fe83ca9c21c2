"""How fast this machine multiplies matrices: ``python -m smalti.fleet.probes.matmul --threads 2 --dtype bf16``.

Prints one JSON object ``{device, threads, dtype, flops_per_s, size}`` and nothing else, after about a second of work
(see ``smalti.dist.peak``) and the import of torch.
"""

import argparse
import json


def main() -> None:
    """Measure as the arguments say, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.threads, arguments.dtype, arguments.device)))


def measure(threads: int, dtype: str, device: str) -> dict[str, object]:
    """The best matmul rate of the device, with what it was measured on."""
    import torch

    from smalti.dist.peak import matmul_rate

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if threads > 0:
        torch.set_num_threads(threads)
    flops_per_s, size = matmul_rate(torch.device(device), dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "flops_per_s": flops_per_s,
        "size": size,
    }


if __name__ == "__main__":
    main()
