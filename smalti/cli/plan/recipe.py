"""What the verbs of ``smalti plan`` that take a recipe share: their arguments, and how a recipe and a GPU are found."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.track.report.read import RunRecord

Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine's CPU first, which takes 30 to 60 s.")]
Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or the name of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the recipe.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gpu = Annotated[
    str | None, typer.Option(help="Plan for ranks on this device (a name of 'smalti plan hardware', or a .yaml file).")
]


def load_recipe(recipe: str, overrides: list[str] | None) -> "RunConfig":
    from smalti.cli.working_directory import load_run

    return load_run(recipe, overrides or []).config


def device_of(record: "RunRecord") -> "Hardware | None":
    """The device that a run's ranks had, where its driver's name for it is known; None too for a CPU."""
    from smalti.config.hardware import hardware_of_driver

    if not str(record.of_events("device")).startswith("cuda"):
        return None
    return hardware_of_driver(str(record.of_events("device_name")))


def measured_here(config: "RunConfig") -> "Hardware":
    """This machine's CPU, measured for a recipe: in its format, with its threads; says on stderr what it does."""
    from smalti.base.env import cpu_count
    from smalti.fleet.measure import measured_machine

    parallel = config.train.parallel
    threads = cpu_count() if parallel.threads == "auto" else min(parallel.threads * parallel.ranks, cpu_count())
    return measured_machine(
        threads=threads,
        formats=(config.train.precision.compute,),
        tell=lambda line: typer.echo(f"measuring: {line}", err=True),
    )
