"""Arguments and options that several commands share, as typer reads them."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run, a Hugging Face folder, or models:/NAME@TAG.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the recipe.")]
Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or the name of a recipe.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]
