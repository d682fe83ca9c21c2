"""The devices of a ``smalti plan`` command: the options that choose them, and checks."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.track.report.read import RunRecord

Gpu = Annotated[
    str | None, typer.Option(help="Plan for ranks on this device (a name of 'smalti plan hardware', or a .yaml file).")
]
GpuOrAssumed = Annotated[
    str | None,
    typer.Option("--gpu", help="A name of 'smalti plan hardware', or a .yaml file of a device; absent: h100-sxm."),
]
GpuOrAll = Annotated[
    str | None, typer.Option("--gpu", help="Only this device (h100-sxm), or a .yaml file of one; absent: all.")
]
Usable = Annotated[
    float | None,
    typer.Option(help="Share of a device's memory that may be used; absent: what the system leaves."),
]

ASSUMED_GPU = "h100-sxm"
ASSUMED = f"assumed: --gpu {ASSUMED_GPU}, because none is given"


def device_of_run(record: "RunRecord") -> "Hardware | None":
    """Return the device of a run's ranks by its driver's name; None for a CPU and for an unknown device."""
    from smalti.config.hardware import hardware_of_driver

    if not str(record.of_events("device")).startswith("cuda"):
        return None
    return hardware_of_driver(str(record.of_events("device_name")))


def select_devices(gpu: str | None) -> "list[Hardware]":
    """Return the device of that name, or all known ones except CPUs."""
    from smalti.config.hardware import hardware, hardware_names

    if gpu is not None:
        return [hardware(gpu)]
    return [device for device in map(hardware, hardware_names()) if device.kind != "cpu"]


def require_trainable(device: "Hardware") -> None:
    """Raise UserError for a device that ``smalti train`` does not run on."""
    from smalti.base.errors import UserError

    if device.kind == "mps":
        raise UserError(
            f"smalti train does not run on {device.title}", allowed="CUDA, ROCm, a CPU", hint="--gpu h100-sxm"
        )


def require_layouts(device: "Hardware", number: int) -> None:
    """Raise UserError where no layout is computed: on an untrainable device, and for several ranks on one CPU."""
    from smalti.base.errors import UserError

    require_trainable(device)
    if device.kind == "cpu" and number != 1:
        raise UserError(
            f"{number:,} x {device.title}: ranks on a CPU share its threads and memory; a layout needs a device for "
            "each rank",
            allowed="--gpus 1 of a CPU, or a GPU",
            hint=f"smalti plan time RECIPE train.parallel.ranks={number} --gpu {device.name}.yaml, or --gpu h100-sxm",
        )


def usable_bytes(device: "Hardware", usable_frac: float | None, *, reserved_frac: float | None = None) -> float:
    """Return the usable bytes of a device; ``reserved_frac`` of it is left free where the system sets no limit."""
    from smalti.base.errors import UserError
    from smalti.plan.serving.devices import RESERVED_FRAC, usable_memory_bytes

    if usable_frac is not None and not 0 < usable_frac <= 1:
        raise UserError(f"--usable {usable_frac} is not a share", allowed="above 0, up to 1")
    reserved_frac = RESERVED_FRAC if reserved_frac is None else reserved_frac
    return usable_memory_bytes(device, usable_frac, reserved_frac=reserved_frac)


def too_small_text(gpu: str) -> str:
    """Return the line for a device that is too small in any number."""
    from smalti.config.hardware import hardware
    from smalti.plan.serving.devices import max_devices

    device = hardware(gpu)
    largest = max_devices(device)
    if largest is None:
        return f"no number of {device.name} is enough"
    if largest == 1:
        return f"one {device.name} is not enough, and no network that joins several is known"
    return f"a node of {largest} {device.name} is not enough, and no network between nodes is known"
