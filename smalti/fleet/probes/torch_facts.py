"""Prints what PyTorch can do on this machine: ``python -m smalti.fleet.probes.torch_facts``.

Prints one JSON object and nothing else. Each fact is queried separately: if this PyTorch does not know
it, or a broken driver fails, its value is the error.
"""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def main() -> None:
    """Print the facts."""
    print(json.dumps(facts()))


def facts() -> dict[str, Any]:
    """Return fact -> value in JSON; if the query failed, ``error: ...``."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        **{name: _answer(query) for name, query in _QUERIES.items()},
    }


def _answer(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except Exception as error:
        return f"error: {type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _devices() -> list[dict[str, Any]]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": about.name,
                "memory_bytes": about.total_memory,
                "capability": f"{about.major}.{about.minor}",
                "bf16": torch.cuda.is_bf16_supported(),
            }
        )
    return devices


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in backends.items() if available()]


def _nccl() -> str | None:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _bf16_on_cpu() -> str:
    import torch

    return "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated"


def _grouped_mm() -> list[str]:
    """Return the devices on which ``torch.nn.functional.grouped_mm`` runs in bfloat16."""
    import torch
    from torch.nn import functional

    devices = []
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        x_SD, w_EDF = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((16, 16), (2, 16, 16)))
        functional.grouped_mm(x_SD, w_EDF, offs=torch.tensor([8, 16], dtype=torch.int32, device=device))
        devices.append(device)
    return devices


def _attention() -> list[str]:
    """Return the kernels available to ``scaled_dot_product_attention``, on CUDA if there is one, else on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return ["flash (cpu)", "math"]
    backend = torch.backends.cuda
    kernels = {
        "flash": backend.is_flash_attention_available() and backend.flash_sdp_enabled(),
        "efficient": backend.mem_efficient_sdp_enabled(),
        "cudnn": backend.cudnn_sdp_enabled(),
        "math": backend.math_sdp_enabled(),
    }
    return [name for name, enabled in kernels.items() if enabled]


def _attention_kernels() -> dict[str, dict[str, str]]:
    """Return device and dtype -> what a model needs of attention -> the kernel that trains rows of 2,048 tokens."""
    from smalti.model.blocks.attention.choice import kernels_on_this_machine

    return {name: dict(chosen) for name, chosen in kernels_on_this_machine(2048).items()}


def _cpu_capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cudnn() -> int | None:
    import torch

    return torch.backends.cudnn.version()


_QUERIES: dict[str, Callable[[], Any]] = {
    "devices": _devices,
    "cpu_capability": _cpu_capability,
    "threads": _threads,
    "bf16_on_cpu": _bf16_on_cpu,
    "distributed": _backends,
    "nccl": _nccl,
    "cudnn": _cudnn,
    "grouped_mm": _grouped_mm,
    "attention": _attention,
    "attention_kernels": _attention_kernels,
    "flex_attention": lambda: find_spec("torch.nn.attention.flex_attention") is not None,
    "flash_attn_package": lambda: find_spec("flash_attn") is not None,
    "triton": lambda: find_spec("triton") is not None,
    "cpp_compiler": lambda: next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None) is not None,
}
"""Name -> query; ``cpp_compiler`` is what torch.compile needs on the CPU."""


if __name__ == "__main__":
    main()
