"""``smalti plan hardware this-machine``: measures this machine, and keeps what it found as the file of a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware

THIS_MACHINE = "this-machine"


def measure(save: str | None, threads: int | None, device: Literal["cpu", "cuda"] = "cpu") -> "Hardware":
    """Measure the CPU or the first GPU, saying on stderr what; with ``save`` also write the file."""
    from smalti.base.errors import UserError
    from smalti.fleet.measure import measured_gpu, measured_machine

    def tell(line: str) -> None:
        typer.echo(f"measuring: {line}", err=True)

    if save is not None and not save.endswith((".yaml", ".yml")):
        raise UserError(f"--save {save}", allowed="a name that ends in .yaml", hint=f"--save {save}.yaml")
    if save is not None and not Path(save).resolve().parent.is_dir():
        raise UserError(f"--save {save}: no folder {Path(save).parent}", hint="make it first")
    if threads is not None and threads < 1:
        raise UserError(f"--threads {threads}", allowed="1 or more")
    if threads is not None and device == "cuda":
        raise UserError("--threads has no effect on a GPU", allowed="with --device cpu")
    found = measured_gpu(tell=tell) if device == "cuda" else measured_machine(threads=threads or 0, tell=tell)
    if save is not None:
        write(found, save)
        typer.echo(f"wrote {save}; plan with it: smalti plan time RECIPE --gpu {save}", err=True)
    return found


def write(machine: "Hardware", path: str) -> None:
    """The file of a device, each measured row on a line of its own."""
    import yaml

    values = machine.model_dump(mode="json", exclude_defaults=True)
    Path(path).write_text(yaml.safe_dump(values, default_flow_style=None, sort_keys=False, width=110))
