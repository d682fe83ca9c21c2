"""What a device can do: published peaks of known GPUs as data, and the record of a rate measured here.

An unknown device has no peak (None), never that of a similar one: no MFU is better than a wrong one. Peaks are dense;
vendors print twice as much "with sparsity".
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from smalti.base.errors import DataError


@dataclass(frozen=True)
class Peak:
    """Published figures of one device."""

    name: str
    """How Smalti names it."""
    pattern: str
    """Regular expression on the name that the driver reports."""
    bf16_flops_per_s: float
    """Dense bf16 matmul with fp32 accumulation."""
    memory_bytes: float
    """Device memory."""
    source: str
    """Where the figures are printed."""


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"

PEAKS: tuple[Peak, ...] = (
    Peak("B200 SXM", r"\bB200\b", 2250e12, 180e9, f"{_NVIDIA}/hgx/ (4.5 PFLOP/s a GPU with sparsity)"),
    Peak("GH200", r"\bGH200\b", 989e12, 96e9, f"{_NVIDIA}/grace-hopper-superchip/"),
    Peak("H200 NVL", r"\bH200 NVL\b", 835.5e12, 141e9, f"{_NVIDIA}/h200/"),
    Peak("H200 SXM", r"\bH200\b", 989e12, 141e9, f"{_NVIDIA}/h200/"),
    Peak("H100 NVL", r"\bH100 NVL\b", 835.5e12, 94e9, f"{_NVIDIA}/h100/"),
    Peak("H100 PCIe", r"\bH100 PCIe\b", 756e12, 80e9, f"{_NVIDIA}/h100/ (data sheet, first edition)"),
    Peak("H100 SXM", r"\bH100\b", 989e12, 80e9, f"{_NVIDIA}/h100/"),
    Peak("H800 SXM", r"\bH800\b(?! PCIe)", 989e12, 80e9, "the H100 SXM with less NVLink"),
    Peak("A100 80GB", r"\bA100.*80GB", 312e12, 80e9, f"{_NVIDIA}/a100/"),
    Peak("A100 40GB", r"\bA100\b", 312e12, 40e9, f"{_NVIDIA}/a100/"),
    Peak("A800 80GB", r"\bA800\b", 312e12, 80e9, "the A100 with less NVLink"),
    Peak("L40S", r"\bL40S\b", 362e12, 48e9, f"{_NVIDIA}/l40s/"),
    Peak("L4", r"\bL4\b", 121e12, 24e9, f"{_NVIDIA}/l4/"),
    Peak("A10", r"\bA10\b", 125e12, 24e9, f"{_NVIDIA}/products/a10-gpu/"),
    Peak("MI325X", r"\bMI325X\b", 1307.4e12, 256e9, f"{_AMD}/mi300/mi325x.html"),
    Peak("MI300X", r"\bMI300X\b", 1307.4e12, 192e9, f"{_AMD}/mi300/mi300x.html"),
)
"""First match wins, so a narrower name stands above a wider one."""

GEMM_OF_PEAK_FRAC = 0.8
"""What a large plain bf16 matmul reaches of the published peak (measured: 790 of 989 TFLOP/s on an H200 SXM)."""


def known_peak(device: str) -> Peak | None:
    """The published figures for a device name as the driver reports it ('NVIDIA H100 80GB HBM3'), or None."""
    for peak in PEAKS:
        if re.search(peak.pattern, device, re.IGNORECASE):
            return peak
    return None


def peak_named(name: str) -> Peak | None:
    """The figures for a name as a person writes it: 'H100 SXM', 'h200', 'A100 80GB'; None when unknown."""
    for peak in PEAKS:
        if peak.name.lower() == name.strip().lower():
            return peak
    return known_peak(name)


@dataclass(frozen=True)
class MeasuredRate:
    """A matmul rate measured on this machine by ``smalti.fleet.probes.matmul``."""

    device: str
    """Name of the device ('cpu' or as the driver reports it)."""
    threads: int
    """CPU threads used."""
    dtype: str
    """``bf16`` or ``fp32``."""
    flops_per_s: float
    """Best rate seen over the sizes tried."""
    size: int
    """Side of the square matrices at that rate."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "MeasuredRate":
        """Read what ``to_json`` or the probe wrote; DataError when a field is missing or of the wrong kind."""
        try:
            rate = cls(
                device=str(value["device"]),
                threads=int(value["threads"]),
                dtype=str(value["dtype"]),
                flops_per_s=float(value["flops_per_s"]),
                size=int(value["size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{value!r} is not a measured rate ({error!r})",
                allowed="an object with device, threads, dtype, flops_per_s, size",
            ) from error
        if not 0 < rate.flops_per_s < float("inf"):
            raise DataError(f"a measured rate of {rate.flops_per_s} FLOP/s cannot be", allowed="a number above 0")
        return rate
