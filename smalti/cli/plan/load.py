"""Loads the run or the model that a command of ``smalti plan`` is about."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.model import ModelConfig
    from smalti.config.run import RunConfig

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset, a recipe, a run folder, or a folder with a config.json."),
]
ModelOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="A.B=VALUE", help="Changes to the preset's fields, or to the recipe's."),
]


def load_recipe(recipe: str, overrides: list[str] | None) -> "RunConfig":
    """Return the config of a recipe or run folder with the overrides applied."""
    from smalti.cli.working_directory import load_run

    return load_run(recipe, overrides or []).config


def load_model(name: str, overrides: list[str] | None) -> "ModelConfig":
    """Return the model section of a preset, recipe, run folder, or folder with a ``config.json``.

    Raises UserError for others.
    """
    from pathlib import Path

    from smalti.base.errors import UserError
    from smalti.cli.working_directory import load_run
    from smalti.config.find import find_recipe, hint_of_preset, is_preset, keys_of
    from smalti.config.load import from_dict, load
    from smalti.config.model import ModelConfig

    if (Path(name) / "config.json").is_file():
        from smalti.model.huggingface_config import open_config

        if overrides:
            raise UserError(
                f"{overrides[0]} would change {name}/config.json",
                allowed="changes to a preset or a recipe",
                hint="leave it out: the folder's weights have that shape and no other",
            )
        return open_config(name).config
    if is_preset(name) and not Path(name).exists():
        return from_dict(ModelConfig, {"preset": name}, f"preset {name}", overrides or []).config
    try:
        recipe = find_recipe(name)
    except UserError as error:
        raise UserError(
            f"'{name}' is not a known model",
            allowed="a preset (smalti config show lists them), a recipe, a run folder, a folder with a config.json",
            hint=hint_of_preset(name) or error.hint,
        ) from error
    if keys_of(recipe.text) & {"model", "init_from"}:
        return load_run(name, overrides or []).config.model
    return load(ModelConfig, name, overrides or []).config
