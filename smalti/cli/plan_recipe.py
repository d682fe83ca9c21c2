"""What the verbs of ``smalti plan`` that take a recipe share: their arguments, and how a recipe and a GPU are found."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.track.report.read import RunRecord

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or the name of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the recipe.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gpu = Annotated[
    str | None, typer.Option(help="Plan for ranks on this device (a name of 'smalti plan hardware', or a .yaml file).")
]


def load_recipe(recipe: str, overrides: list[str] | None) -> "RunConfig":
    from smalti.config.load import load
    from smalti.config.run import RunConfig

    return load(RunConfig, recipe, overrides or []).config


def matmul_frac_of(record: "RunRecord", compute: str) -> float | None:
    """Share of the peak that a run recorded which a large matmul reaches; None where that is not known.

    A peak that was measured, as on a CPU, is such a matmul's rate.
    """
    from smalti.config.hardware import hardware_of_driver

    if not str(record.of_events("device")).startswith("cuda"):
        return 1.0
    known = hardware_of_driver(str(record.of_events("device_name")))
    return known.matmul_frac if known and compute == "bf16" else None
