"""Devices as data: ``presets/hardware/NAME.yaml``, or a YAML file of the user or of a measured machine.

Guarantees: every figure has a source; an unknown device raises UserError and is never taken for a similar one; each
name is that of one device. Peaks are dense; vendors print twice as much "with sparsity".
"""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from smalti.base.errors import DataError, UserError, nearest
from smalti.config.measured import Measured
from smalti.config.problems import as_user_error
from smalti.config.schema import Config, Count, NotAllowed, Real
from smalti.config.yaml_lines import inline, parse

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4"]
"""Formats of the numbers that a matrix multiplication reads; int8 counts operations of integers."""

Rate = Annotated[Real, Field(gt=0)]
"""A finite number above 0."""

_SUFFIXES = (".yaml", ".yml")
_FIGURES = ("peak_flops_per_s", "matmul_frac", "memory_bytes", "usable_memory_bytes", "memory_bytes_per_s",
            "node_bytes_per_s", "host_bytes_per_s", "network_bytes_per_s")  # fmt: skip
"""The fields that must name their source where they are given."""


class Price(Config):
    """The usual price of an hour of one device."""

    usd_per_hour: Rate
    """Usual on-demand price."""
    date: str = Field(pattern=r"^\d{4}-\d{2}$")
    """Month of the price, as 2026-05."""
    source: str = Field(min_length=1)
    """Source of the price."""


class Hardware(Config):
    """One device and its links to others; rates are of one device, in one direction."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name in commands, as ``h100-sxm``."""
    title: str = Field(min_length=1)
    """Full name, as ``NVIDIA H100 SXM 80 GB``."""
    kind: Literal["cuda", "rocm", "mps", "cpu"]
    """PyTorch's backend for it."""
    aliases: tuple[str, ...] = ()
    """Other names in use, in lower case."""
    drivers: tuple[str, ...] = ()
    """Regular expressions on the name that the driver reports; none where that name does not identify the device."""
    peak_flops_per_s: dict[Precision, Rate] = Field(default_factory=dict)
    """Dense peaks of matrix multiplication by format, sums kept in fp32; empty: not published."""
    matmul_frac: Real | None = Field(default=None, gt=0, le=1)
    """Share of the bf16 peak that a large plain matmul reaches; None: not known."""
    memory_bytes: Rate
    """Device memory as its driver reports it; if unknown, the vendor's GB of 1e9 bytes."""
    usable_memory_bytes: Rate | None = None
    """Part of it that programs may use where the system sets a limit (memory shared with the CPU)."""
    memory_bytes_per_s: Rate
    """Bandwidth of the device memory."""
    devices_per_node: Count = 1
    """Devices in a usual node, connected by ``node_link``."""
    node_link: str | None = None
    """Link between the devices of a node, as ``NVLink 4 and NVSwitch``."""
    node_bytes_per_s: Rate | None = None
    """Bandwidth to all other devices of its node together; None: a single device."""
    pair_bytes_per_s: Rate | None = None
    """Bandwidth to one other device of its node if that is less; None: ``node_bytes_per_s``."""
    host_bytes_per_s: Rate | None = None
    """Bandwidth to the memory of its host; None: the same memory, or unknown."""
    network_bytes_per_s: Rate | None = None
    """Bandwidth of its share of the network between nodes in a usual cluster; None: no network."""
    price: Price | None = None
    """Usual price; None: not rented by the hour, or unknown."""
    sources: dict[str, str]
    """Source of each figure, by field."""
    notes: tuple[str, ...] = ()
    """Further notes."""
    measured: Measured | None = None
    """Results of micro-benchmarks on it; None: only published figures are known."""

    @field_validator("drivers")
    @classmethod
    def _patterns(cls, drivers: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in drivers:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression ({error})") from error
        return drivers

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unknown = sorted(set(self.sources) - set(type(self).model_fields))
        if unknown:
            raise NotAllowed(f"sources names {', '.join(unknown)}", allowed=", ".join(_FIGURES), hint="delete it there")
        missing = [name for name in _FIGURES if getattr(self, name) and not self.sources.get(name)]
        if missing:
            raise NotAllowed(
                f"no source is named for {', '.join(missing)}",
                allowed="a source for every figure",
                hint=f"write 'sources: {{{missing[0]}: where it is printed}}'",
            )
        if self.matmul_frac is not None and "bf16" not in self.peak_flops_per_s:
            raise NotAllowed(
                f"matmul_frac = {self.matmul_frac} is a share of a bf16 peak that is not given",
                allowed="null without peak_flops_per_s.bf16",
                hint="give peak_flops_per_s: {bf16: ...}",
            )
        if self.usable_memory_bytes is not None and self.usable_memory_bytes > self.memory_bytes:
            raise NotAllowed(
                f"usable_memory_bytes = {self.usable_memory_bytes:g} is more than memory_bytes",
                allowed=f"at most {self.memory_bytes:g}",
                hint="leave usable_memory_bytes out where programs may take all of it",
            )
        if self.measured is not None and self.kind != "cpu":
            raise NotAllowed(
                f"a section measured in the file of a {self.kind} device",
                allowed="kind: cpu; what works take inside a step beyond that is known of CPUs alone",
                hint="delete it: a GPU is planned with by its peaks and bandwidth",
            )
        if self.devices_per_node > 1 and self.node_bytes_per_s is None:
            raise NotAllowed(
                f"devices_per_node = {self.devices_per_node} without node_bytes_per_s",
                allowed="both, or one device in a node",
                hint="give node_bytes_per_s, as 450e9",
            )
        return self

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in a format; None where it is unknown."""
        return {str(name): peak for name, peak in self.peak_flops_per_s.items()}.get(precision)

    def require_peak(self, precision: str) -> float:
        """Return the dense peak in a format. Raises UserError where it is unknown."""
        peak = self.peak(precision)
        if peak is None:
            raise UserError(
                f"no {precision} peak is known for {self.title}",
                allowed=", ".join(self.peak_flops_per_s) or "none: its vendor prints no peak",
                hint="give peak_flops_per_s in a .yaml file of the device",
            )
        return peak

    @property
    def available_memory_bytes(self) -> float:
        """Memory that programs may use: ``usable_memory_bytes`` where there is a limit, otherwise all."""
        return self.usable_memory_bytes or self.memory_bytes


@cache
def hardware_names() -> tuple[str, ...]:
    """Return the names of the devices in the package, sorted."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if _is_yaml(entry.name)))


def hardware(name_or_path: str) -> Hardware:
    """Return the device of a name (``h100-sxm``, ``H100 SXM``), of a name that a driver reports, or of a .yaml file.

    Raises UserError with the nearest name otherwise.
    """
    if _is_yaml(name_or_path):
        return read_hardware(name_or_path)
    name = re.sub(r"[\s_]+", "-", name_or_path.strip().lower())
    if name in hardware_names():
        return _preset(name)
    known = next((preset for preset in _presets() if name in preset.aliases), None) or hardware_of_driver(name_or_path)
    if known is not None:
        return known
    several = [preset for preset in hardware_names() if name and preset.startswith(f"{name}-")]
    close = nearest(name, hardware_names())
    raise UserError(
        f"'{name_or_path}' is several devices" if several else f"the device '{name_or_path}' is not known",
        allowed=", ".join(several or (*hardware_names(), "a .yaml file of a device")),
        hint=f"write {several[0]}"
        if several
        else f"did you mean '{close}'?"
        if close
        else "write a .yaml file of it, as 'smalti plan hardware rtx4090 --json' prints one; "
        "a CPU is measured: smalti plan hardware this-machine --save machine.yaml",
    )


def hardware_of_driver(reported: str) -> Hardware | None:
    """Return the device that a driver reports as ``reported`` ('NVIDIA H100 80GB HBM3'); None for an unknown one.

    A part of a device (``MIG 3g.40gb``) is unknown too, as it has other figures.
    """
    if re.search(r"\bMIG\b", reported, re.IGNORECASE):
        return None
    return next((preset for preset in _presets() if is_reported_as(preset, reported)), None)


def is_reported_as(device: Hardware, reported: str) -> bool:
    """Return whether a driver reports ``device`` by this name."""
    return any(re.search(pattern, reported, re.IGNORECASE) for pattern in device.drivers)


def read_hardware(path: str) -> Hardware:
    """Return the device of a file. Raises UserError with the line of each problem."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(
            f"{path} cannot be read: {reason}",
            allowed=f"a .yaml file of a device, or one of: {', '.join(hardware_names())}",
            hint="smalti plan hardware lists the devices",
        ) from error
    return _read(text, path)


@cache
def _preset(name: str) -> Hardware:
    return _read(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def _presets() -> list[Hardware]:
    return [_preset(name) for name in hardware_names()]


def _folder() -> Traversable:
    return files("smalti.config").joinpath("presets/hardware")


def _is_yaml(name: str) -> bool:
    return name.endswith(_SUFFIXES)


def _read(text: str, label: str) -> Hardware:
    tree = parse(text, label)
    if not isinstance(tree.value, dict):
        raise UserError(
            f"{label} contains {inline(tree.value)[:80]}",
            allowed="the fields of a device, as 'key: value' lines",
            hint="smalti plan hardware h100-sxm --json prints one",
        )
    try:
        return Hardware.model_validate(tree.value)
    except ValidationError as error:
        raise as_user_error(error, Hardware, tree.value, tree.origins, label) from error
