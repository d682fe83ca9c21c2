"""``smalti config``: what may be written in a recipe, and what a recipe comes to."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.schema import Config

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Show recipes and the schema of configs."
)

_KINDS = "train, curate, tokenize or eval"


@app.command(epilog="Example: smalti config schema > smalti.schema.json")
def schema(
    kind: Annotated[str, typer.Argument(help=f"Which config: {_KINDS}.")] = "train",
) -> None:
    """Print the JSON Schema of a config, for editors that complete and check YAML."""
    import json

    from smalti.config.load import json_schema

    print(json.dumps(json_schema(_model(kind)), indent=2))


@app.command(epilog="Example: smalti config show demo train.optimizer.lr=3e-4")
def show(
    recipe: Annotated[str | None, typer.Argument(help="A file, run folder or name; absent: list the names.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to it.")] = None,
    kind: Annotated[
        str | None, typer.Option(help=f"Which config it is: {_KINDS}; absent: guessed from its keys.")
    ] = None,
) -> None:
    """Print a recipe resolved, with where each value came from; without a recipe, the names of recipes and presets."""
    from smalti.config import find, load

    if recipe is None:
        print("recipes:", ", ".join(find.recipe_names()) or "none in this package")
        print("model presets:", ", ".join(find.preset_names()))
        return
    print(load.show(load.load(_model(kind or _guess(recipe)), recipe, overrides or [])), end="")


@app.command(epilog="Example: smalti config diff runs/demo demo train.optimizer.lr=3e-4")
def diff(
    before: Annotated[str, typer.Argument(help="A recipe, run folder or name.")],
    after: Annotated[str, typer.Argument(help="Another.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to it.")] = None,
    kind: Annotated[str, typer.Option(help=f"Which config they are: {_KINDS}.")] = "train",
) -> None:
    """Print what differs between two configs; exit 3 if their identity differs (they are two runs, not one)."""
    from smalti.config.identity import difference, placement_difference
    from smalti.config.load import load

    model = _model(kind)
    first, second = load(model, before).config, load(model, after, overrides or []).config
    lines = difference(first, second)
    for title, found in (("identity", lines), ("placement", placement_difference(first, second))):
        if found:
            print(f"{title}:", *(f"  {line}" for line in found), sep="\n")
    if lines:
        raise typer.Exit(3)


def _guess(recipe: str) -> str:
    """The kind of config that knows most of a recipe's keys; of equals the first, and so ``train`` for want of any."""
    from smalti.config.find import find_recipe, keys_of

    keys = keys_of(find_recipe(recipe).text)
    models = _models()
    return max(models, key=lambda kind: len(keys & set(models[kind].model_fields)))


def _models() -> "dict[str, type[Config]]":
    from smalti.config.data import CurateConfig, TokenizeConfig
    from smalti.config.eval import EvalConfig
    from smalti.config.run import RunConfig

    return {"train": RunConfig, "curate": CurateConfig, "tokenize": TokenizeConfig, "eval": EvalConfig}


def _model(kind: str) -> "type[Config]":
    from smalti.base.errors import UserError, nearest

    models = _models()
    if kind not in models:
        close = nearest(kind, models)
        raise UserError(
            f"'{kind}' is not a kind of config",
            allowed=", ".join(models),
            hint=f"did you mean {close}?" if close else None,
        )
    return models[kind]
