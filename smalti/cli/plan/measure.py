"""Measures this machine, and saves the measurement as the file of a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig

THIS_MACHINE = "this-machine"

Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine's CPU first, which takes 30 to 60 s.")]


def measure(save: str | None, threads: int | None, device: Literal["cpu", "cuda"] = "cpu") -> "Hardware":
    """Measure the CPU or the first GPU, with progress on stderr; with ``save`` also write the file."""
    from smalti.base.errors import UserError
    from smalti.fleet.measure import measured_gpu, measured_machine

    if save is not None and not save.endswith((".yaml", ".yml")):
        raise UserError(
            f"--save {save} is not a .yaml file",
            allowed="a file whose name ends with .yaml",
            hint=f"--save {save}.yaml",
        )
    if save is not None and not Path(save).resolve().parent.is_dir():
        raise UserError(f"--save {save}: the folder {Path(save).parent} does not exist", hint="make it first")
    if threads is not None and threads < 1:
        raise UserError(f"--threads {threads} is out of range", allowed="1 or more")
    if threads is not None and device == "cuda":
        raise UserError("--threads has no effect on a GPU", allowed="with --device cpu")
    is_gpu = device == "cuda"
    machine = measured_gpu(report=_report) if is_gpu else measured_machine(threads=threads or 0, report=_report)
    if save is not None:
        write(machine, save)
        typer.echo(f"wrote {save}; plan with it: smalti plan time RECIPE --gpu {save}", err=True)
    return machine


def measure_for(config: "RunConfig") -> "Hardware":
    """Measure this machine's CPU in the number format and with the threads of a run, with progress on stderr."""
    from smalti.base.machine import cpu_count
    from smalti.fleet.measure import measured_machine

    parallel = config.train.parallel
    threads = cpu_count() if parallel.threads == "auto" else min(parallel.threads * parallel.ranks, cpu_count())
    return measured_machine(threads=threads, formats=(config.train.precision.compute,), report=_report)


def write(machine: "Hardware", path: str) -> None:
    """Write the file of a device, with each measured row on a line of its own."""
    import yaml

    values = machine.model_dump(mode="json", exclude_defaults=True)
    Path(path).write_text(yaml.safe_dump(values, default_flow_style=None, sort_keys=False, width=110))


def _report(line: str) -> None:
    typer.echo(f"measuring: {line}", err=True)
