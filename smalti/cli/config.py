"""``smalti config``: the schema of configs, a recipe resolved, and the differences between two."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.config.load import Loaded
    from smalti.config.schema import Config

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Show recipes and the schema of configs."
)

_COMMANDS = {
    "train": "smalti train",
    "curate": "smalti data curate",
    "tokenize": "smalti data tokenize",
    "dedup": "smalti data dedup",
    "tune": "smalti tune sft",
    "eval": "smalti eval run",
    "model": "section model: of a run; presets are of this kind",
}
"""Kind -> the command that takes it. Where several kinds match a file equally, the first is assumed."""

_KINDS = ", ".join(_COMMANDS)
_Kind = Annotated[str | None, typer.Option(help=f"Kind of config: {_KINDS}; absent: guessed from its keys.")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the config.")]


@app.command(epilog="Example: smalti config schema train > smalti.schema.json")
def schema(kind: Annotated[str, typer.Argument(help=f"Kind of config: {_KINDS}.")] = "train") -> None:
    """Print the JSON Schema of a config, for editors that complete and check YAML.

    An editor with a YAML language server uses it in a YAML file that begins with this line:
    # yaml-language-server: $schema=smalti.schema.json
    """
    import json
    import sys

    from smalti.config.load import json_schema

    print(json.dumps(json_schema(_model(kind)), indent=2))
    if sys.stderr.isatty() and not sys.stdout.isatty():  # redirected to a file by a person
        line = "# yaml-language-server: $schema=FILE"
        typer.echo(f"begin a YAML file with this line for an editor to use it: {line}", err=True)


@app.command(epilog="Example: smalti config show demo train.optimizer.lr=3e-4")
def show(
    recipe: Annotated[
        str | None, typer.Argument(help="A file, run folder, recipe or preset; absent: list the names.")
    ] = None,
    overrides: _Overrides = None,
    kind: _Kind = None,
    as_json: Json = False,
) -> None:
    """Print a resolved recipe with the origin of each value; without a recipe, list recipes and presets."""
    from smalti.cli.tables import print_json
    from smalti.config import find, load

    if recipe is None:
        _list(find.recipe_names(), find.preset_names(), as_json)
        return
    kind = kind or _guess(recipe)
    loaded = _load(kind, recipe, overrides or [])
    if as_json:
        print_json({"kind": kind, "config": loaded.config.model_dump(mode="json"), "origins": loaded.origins})
        return
    print(f"# {kind}: {_COMMANDS[kind]}")
    print(load.show(loaded), end="")


@app.command(epilog="Example: smalti config diff demo demo train.optimizer.lr=3e-4")
def diff(
    before: Annotated[str, typer.Argument(help="A file, run folder, recipe or preset.")],
    after: Annotated[str, typer.Argument(help="Another config of the same kind.")],
    overrides: _Overrides = None,
    kind: _Kind = None,
    as_json: Json = False,
) -> None:
    """Print the differences between two configs, before -> after; exit 3 if they describe different runs."""
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.config.identity import difference, differing, placement_difference

    kinds = [kind or _guess(name) for name in (before, after)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"'{before}' is a config of kind {kinds[0]}, '{after}' of kind {kinds[1]}",
            allowed="two configs of one kind",
            hint="if the kind is guessed wrongly: --kind KIND",
        )
    first = _load(kinds[0], before, []).config
    second = _load(kinds[0], after, overrides or []).config
    lines = {"identity": difference(first, second), "placement": placement_difference(first, second)}
    if as_json:
        identity, placement = differing([first, second])
        print_json({"kind": kinds[0], "identity": identity, "placement": placement})
    else:
        shown = [
            f"{title}:\n" + "\n".join(f"  {line}" for line in differences)
            for title, differences in lines.items()
            if differences
        ]
        print("\n".join(shown) or "nothing differs")
    if lines["identity"]:
        raise typer.Exit(3)


@app.command(epilog="Example: smalti config model runs/demo/export")
def model(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A Hugging Face folder, a run folder or a checkpoint.")
    ],
    as_json: Json = False,
) -> None:
    """Print the model: section of an existing model, for a recipe that starts from it (init_from)."""
    from smalti.base.errors import DataError
    from smalti.cli.tables import print_json
    from smalti.config.yaml_lines import to_yaml
    from smalti.train.origin import model_of

    if not Path(source).exists():
        raise DataError(f"{source} does not exist", allowed="a Hugging Face folder, a run folder or a checkpoint")
    section = {
        "model": {"family": (model_config := model_of(source)).family, **model_config.model_dump(exclude_defaults=True)}
    }
    if as_json:
        print_json(section)
    else:
        print(to_yaml(section), end="")


def _list(recipes: list[str], presets: list[str], as_json: bool) -> None:
    from smalti.cli.tables import print_json, print_table
    from smalti.config.find import DEPTH_PRESETS

    kinds = {name: _guess(name) for name in recipes}
    if as_json:
        print_json({"recipes": kinds, "presets": presets})
        return
    rows = [(name, kind, _COMMANDS[kind]) for name, kind in kinds.items()]
    rows += [(name, "model", "model.preset") for name in (*presets, *DEPTH_PRESETS)]
    print_table(("name", "kind", "for"), rows, empty="no recipe is installed")


def _guess(name: str) -> str:
    """Return the kind of config with most of a file's keys; of several, the one in the file's name, or the first."""
    from smalti.base.errors import UserError
    from smalti.config.find import find_recipe, hint_of_preset, is_preset, keys_of, recipe_names

    if is_preset(name) and name not in recipe_names() and not Path(name).exists():
        return "model"
    try:
        recipe = find_recipe(name)
    except UserError as error:
        hint = hint_of_preset(name)
        if hint is None or (error.hint or "").startswith("did you mean"):
            raise
        raise UserError(error.message, allowed=error.allowed, hint=hint) from error
    keys = keys_of(recipe.text)
    if _is_tuning(recipe.text, recipe.path) and recipe.run is None:
        return "tune"
    models = _models()
    known = {kind: len(keys & set(model.model_fields)) for kind, model in models.items()}
    likely = [kind for kind in models if known[kind] == max(known.values())]
    return next((kind for kind in likely if kind in Path(recipe.label).stem), likely[0])


def _is_tuning(text: str, path: str) -> bool:
    """Return whether a recipe or its base has a section ``tune``."""
    from smalti.config.find import find_recipe, keys_of
    from smalti.config.yaml_lines import parse

    value = parse(text, path).value
    base = value.get("base") if isinstance(value, dict) else None
    return "tune" in keys_of(text) or (isinstance(base, str) and "tune" in keys_of(find_recipe(base, beside=path).text))


def _load(kind: str, name: str, overrides: list[str]) -> "Loaded[Any]":
    """Load a file, run folder or recipe of this kind; a preset where the kind is model and no such file exists."""
    from smalti.cli.working_directory import load_run
    from smalti.config.find import is_preset
    from smalti.config.load import from_dict, load

    model = _model(kind)
    if kind == "model" and is_preset(name) and not Path(name).exists():
        return from_dict(model, {"preset": name}, f"preset {name}", overrides)
    return load_run(name, overrides) if kind == "train" else load(model, name, overrides)


def _models() -> "dict[str, type[Config]]":
    from smalti.config.curate import CurateConfig, TokenizeConfig
    from smalti.config.dedup import DedupConfig
    from smalti.config.eval import EvalConfig
    from smalti.config.model import ModelConfig
    from smalti.config.run import RunConfig
    from smalti.config.tune import TuneRecipe

    kinds: dict[str, type[Config]] = {"train": RunConfig, "curate": CurateConfig, "tokenize": TokenizeConfig}
    return kinds | {"dedup": DedupConfig, "eval": EvalConfig, "model": ModelConfig, "tune": TuneRecipe}


def _model(kind: str) -> "type[Config]":
    from smalti.base.errors import UserError, nearest

    models = _models()
    if kind not in models:
        close = nearest(kind, models)
        raise UserError(
            f"'{kind}' is not a kind of config",
            allowed=_KINDS,
            hint=f"did you mean {close}?" if close else None,
        )
    return models[kind]
