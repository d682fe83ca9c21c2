"""Devices as data: ``presets/hardware/NAME.yaml``, a file of the user's, or what was measured on this machine.

Promises: every figure names its source; an unknown device is refused and never taken for a similar one. Peaks are
dense; vendors print twice as much "with sparsity". Knows no formula and measures nothing.
"""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from smalti.base.errors import UserError, nearest
from smalti.config.schema import Config

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4"]


class Price(Config):
    """What an hour of one device usually costs."""

    usd_per_hour: float = Field(gt=0)
    """Usual on-demand price."""
    date: str
    """When it was read, as 2026-11."""
    source: str
    """Where."""


class Hardware(Config):
    """One device, and how it is joined to others; rates are of one device, in one direction."""

    name: str
    """``h100-sxm``."""
    title: str
    """``NVIDIA H100 SXM 80 GB``."""
    kind: Literal["cuda", "rocm", "mps", "cpu"]
    """What PyTorch reaches it by."""
    drivers: tuple[str, ...] = ()
    """Regular expressions on the name that the driver reports."""
    peak_flops_per_s: dict[Precision, float]
    """Dense peaks of matrix multiplication by format."""
    matmul_frac: float = Field(gt=0, le=1)
    """Share of the bf16 peak that a large plain matmul reaches."""
    memory_bytes: float = Field(gt=0)
    """Device memory."""
    memory_bytes_per_s: float = Field(gt=0)
    """Its bandwidth."""
    devices_per_node: int = Field(default=1, ge=1)
    """Devices in a usual node."""
    node_bytes_per_s: float | None = Field(default=None, gt=0)
    """To the other devices of its node; None: alone."""
    network_bytes_per_s: float | None = Field(default=None, gt=0)
    """Its share of the network between nodes in a usual cluster; None: not joined."""
    price: Price | None = None
    """None: not rented by the hour."""
    sources: dict[str, str]
    """Field -> where the figure is printed."""


@cache
def hardware_names() -> tuple[str, ...]:
    """Names of the devices in the package, sorted."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if _is_yaml(entry.name)))


def hardware(name_or_path: str) -> Hardware:
    """The device of that name (``h100-sxm``), or of a .yaml file; UserError with the nearest name otherwise."""
    if _is_yaml(name_or_path):
        return _read(Path(name_or_path).read_text(), name_or_path)
    name = name_or_path.strip().lower().replace(" ", "-")
    if name not in hardware_names():
        close = nearest(name, hardware_names())
        raise UserError(
            f"the device '{name_or_path}' is not known",
            allowed=", ".join((*hardware_names(), "a .yaml file of a device")),
            hint=f"did you mean '{close}'?" if close else "measure it: smalti plan hardware this-machine",
        )
    return _read(_folder().joinpath(f"{name}.yaml").read_text(), name)


def hardware_of_driver(reported: str) -> Hardware | None:
    """The device that a driver reports as ``reported`` ('NVIDIA H100 80GB HBM3'); None where it is not known."""
    for name in hardware_names():
        known = hardware(name)
        if any(re.search(pattern, reported, re.IGNORECASE) for pattern in known.drivers):
            return known
    return None


def _folder() -> Traversable:
    return files("smalti.config").joinpath("presets/hardware")


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _read(text: str, label: str) -> Hardware:
    try:
        return Hardware.model_validate(yaml.safe_load(text))
    except (ValidationError, yaml.YAMLError) as error:
        raise UserError(
            f"{label} does not describe a device: {error}", hint="see smalti plan hardware --help"
        ) from error
