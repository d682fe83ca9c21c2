"""What the verbs of ``smalti plan`` that take a recipe share: their arguments, and how a recipe and a GPU are found."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from smalti.config.run import RunConfig

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or the name of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the recipe.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gpu = Annotated[str | None, typer.Option(help="Plan for ranks on this GPU ('H100 SXM') instead of this machine.")]


def load_recipe(recipe: str, overrides: list[str] | None) -> "RunConfig":
    from smalti.config.load import load
    from smalti.config.run import RunConfig

    return load(RunConfig, recipe, overrides or []).config


def peak_of(gpu: str) -> Any:
    from smalti.base.errors import UserError
    from smalti.plan.hardware import PEAKS, peak_named

    peak = peak_named(gpu)
    if peak is None:
        raise UserError(
            f"no peak is known for the GPU '{gpu}'",
            allowed=", ".join(one.name for one in PEAKS),
            hint="give a measured rate: --rate 7.9e14",
        )
    return peak
