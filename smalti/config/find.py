"""Recipes (run specs) and presets (model sizes) by name, from the package, a folder, or a path.

Guarantees: works from an installed wheel (``importlib.resources``); a name that is not there is a UserError with the
nearest one. A path always wins over a name only when it is a file, or a run folder with a ``config.yaml``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from smalti.base.errors import DataError, UserError, nearest
from smalti.config.depth import DEEPEST, depth_preset
from smalti.config.yaml_lines import to_yaml

_SUFFIXES = (".yaml", ".yml")
_OF_A_RUN = ("provenance.json", "status.json", "events.jsonl", "metrics.jsonl", "checkpoints")
"""One of these beside a ``config.yaml`` makes its folder a run."""

DIAL = (f"depth-N (N from 1 to {DEEPEST})", "depth-N-moe")
"""Presets that are reckoned out: of a model of N layers (``smalti/config/depth.py``)."""


@dataclass(frozen=True)
class Found:
    """A text with the label that errors and origins show for it."""

    text: str
    label: str
    path: str
    """Where it lies; for a run folder the ``config.yaml`` in it."""
    run: str | None = None
    """The run folder that it is the config of, of all its attempts or of one."""


def recipe_names() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(_entries(_room("recipes")))


def preset_names() -> list[str]:
    """Names of the model presets in the package, sorted; besides them ``DIAL`` are presets."""
    return sorted(_entries(_room("presets")))


def is_preset(name: str) -> bool:
    """Whether ``find_preset`` finds it."""
    return name in preset_names() or depth_preset(name) is not None


def find_recipe(name_or_path: str, *, beside: str | None = None, fields: Collection[str] | None = None) -> Found:
    """The recipe of that name or path; ``beside`` is the file whose folder a relative path starts from.

    ``fields`` are the top-level keys of the kind of config that is wanted: the error offers only recipes of that kind.
    """
    path = Path(name_or_path)
    candidates = [Path(beside).parent / path, path] if beside and not path.is_absolute() else [path]
    for candidate in candidates:
        inside = candidate / "config.yaml"
        if candidate.is_file() or inside.is_file():
            found = candidate if candidate.is_file() else inside
            return Found(_read(found), str(found), str(found), _run_of(found))
    recipes = _entries(_room("recipes"))
    name = name_or_path.removesuffix(".yaml")
    if name in recipes:
        return Found(_read(recipes[name]), f"{name}.yaml", str(recipes[name]))
    recipes = {one: at for one, at in recipes.items() if fields is None or keys_of(_read(at)) <= {*fields, "base"}}
    close = nearest(name, recipes)
    if path.is_dir():
        raise UserError(
            f"the folder '{name_or_path}' has no config.yaml",
            allowed="a run folder, which has one, a .yaml file, or the name of a recipe",
            hint="logs/attempt-N/config.yaml of a run is the config of its attempt N: copy the newest to config.yaml",
        )
    raise UserError(
        f"there is no recipe file or recipe named '{name_or_path}'",
        allowed=f"a path to a .yaml file or a run folder, or one of: {', '.join(sorted(recipes)) or '(no recipe)'}",
        hint=f"did you mean '{close}'?" if close else "check the path; 'smalti config show' lists the recipes by name",
    )


def find_preset(name: str, *, where: str) -> Found:
    """The model preset of that name; ``where`` says who asked, for the error."""
    presets, dialled = _entries(_room("presets")), depth_preset(name)
    if name in presets:
        return Found(_read(presets[name]), f"preset {name}", str(presets[name]))
    if dialled is not None:
        return Found(to_yaml(dialled), f"preset {name}", f"preset {name}")
    raise UserError(
        f"{where}: model.preset = '{name}' is not a preset",
        allowed=", ".join([*sorted(presets), *DIAL]),
        hint=hint_of_preset(name) or "leave 'preset' out and write the fields of model",
    )


def hint_of_preset(name: str) -> str | None:
    """What was probably meant by a name that is no preset."""
    if name.startswith("depth-"):
        return f"N of depth-N goes from 1 to {DEEPEST}, as in depth-12 or depth-12-moe"
    close = nearest(name, preset_names())
    return f"did you mean the preset '{close}'?" if close else None


def keys_of(text: str) -> set[str]:
    """The top-level keys of a YAML text; none where it is no mapping."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return set()
    return {str(key) for key in value} if isinstance(value, dict) else set()


def _run_of(config: Path) -> str | None:
    folder = config.parent
    if folder.parent.name == "logs" and folder.name.startswith("attempt-"):
        folder = folder.parent.parent
    is_run = config.name == "config.yaml" and any((folder / name).exists() for name in _OF_A_RUN)
    return str(folder) if is_run else None


def _room(name: str) -> Traversable:
    return files("smalti.config").joinpath(name)


def _entries(folder: Traversable) -> dict[str, Traversable]:
    if not folder.is_dir():
        return {}
    return {entry.name.rsplit(".", 1)[0]: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)}


def _read(path: Path | Traversable) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", hint="is this really a YAML recipe?") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
