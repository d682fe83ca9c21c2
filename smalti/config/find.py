"""Finds recipes (configs of runs) by name or path, and presets (sections ``model``) by name.

Names are those of the package, also of an installed wheel (``importlib.resources``). A path takes precedence over a
name if it is a file, or a run folder with a ``config.yaml``.
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

DEPTH_PRESETS = (f"depth-N (N from 1 to {DEEPEST})", "depth-N-moe")
"""Presets that are computed from a number of layers (``smalti/config/depth.py``)."""


@dataclass(frozen=True)
class ConfigFile:
    """The text of a recipe or preset."""

    text: str
    label: str
    """Name of the file in errors and origins."""
    path: str
    """Path of the file; for a run folder that of its ``config.yaml``."""
    run: str | None = None
    """The run folder whose config (of all attempts or of one) this is; None for other files."""


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package, sorted."""
    return sorted(_entries(_folder("recipes")))


def preset_names() -> list[str]:
    """Return the names of the model presets in the package, sorted, without ``DEPTH_PRESETS``."""
    return sorted(_entries(_folder("presets")))


def is_preset(name: str) -> bool:
    """Return whether ``name`` is that of a preset, ``depth-N`` included."""
    return name in preset_names() or depth_preset(name) is not None


def find_recipe(name_or_path: str, *, beside: str | None = None, fields: Collection[str] | None = None) -> ConfigFile:
    """Return the recipe of a name or path. Raises UserError with the nearest name where there is none.

    beside: the file from whose folder a relative path starts. fields: top-level keys of the expected kind of config;
    the error lists only recipes with these keys.
    """
    path = Path(name_or_path)
    candidates = [Path(beside).parent / path, path] if beside and not path.is_absolute() else [path]
    for candidate in candidates:
        inside = candidate / "config.yaml"
        if candidate.is_file() or inside.is_file():
            file = candidate if candidate.is_file() else inside
            return ConfigFile(_read(file), str(file), str(file), _run_of(file))
    recipes = _entries(_folder("recipes"))
    name = name_or_path.removesuffix(".yaml")
    if name in recipes:
        return ConfigFile(_read(recipes[name]), f"{name}.yaml", str(recipes[name]))
    recipes = {
        recipe: file for recipe, file in recipes.items() if fields is None or keys_of(_read(file)) <= {*fields, "base"}
    }
    if path.is_dir():
        raise UserError(
            f"the folder '{name_or_path}' has no config.yaml",
            allowed="a run folder, which has one, a .yaml file, or the name of a recipe",
            hint="logs/attempt-N/config.yaml of a run is the config of its attempt N: copy the newest to config.yaml"
            if (path / "logs").is_dir()
            else "'smalti config show' lists the recipes by name",
        )
    hint = "check the path; 'smalti config show' lists the recipes by name"
    message = f"there is no recipe file or recipe named '{name_or_path}'"
    if "=" in name_or_path:
        hint = f"the recipe comes first, its changes follow: RECIPE {name_or_path}"
    elif path.suffix in _SUFFIXES:
        message = f"there is no file '{name_or_path}'"
        files_there = [file.name for file in candidates[0].parent.glob("*") if file.suffix in _SUFFIXES]
        if sibling := nearest(path.name, files_there):
            hint = f"did you mean '{path.with_name(sibling)}'?"
        elif example := nearest(path.stem, recipes) or (next(iter(recipes)) if len(recipes) == 1 else None):
            hint = f"'smalti config show {example}' prints an example"
    elif close := nearest(name, recipes):
        hint = f"did you mean '{close}'?"
    raise UserError(
        message,
        allowed=f"a path to a .yaml file or a run folder, or one of: {', '.join(sorted(recipes)) or '(no recipe)'}",
        hint=hint,
    )


def find_preset(name: str, *, where: str) -> ConfigFile:
    """Return the model preset of a name. Raises UserError, which begins with ``where``, if there is none."""
    presets = _entries(_folder("presets"))
    if name in presets:
        return ConfigFile(_read(presets[name]), f"preset {name}", str(presets[name]))
    computed = depth_preset(name)
    if computed is not None:
        return ConfigFile(to_yaml(computed), f"preset {name}", f"preset {name}")
    raise UserError(
        f"{where}: model.preset = '{name}' is not a preset",
        allowed=", ".join([*sorted(presets), *DEPTH_PRESETS]),
        hint=hint_of_preset(name) or "leave 'preset' out and write the fields of model",
    )


def hint_of_preset(name: str) -> str | None:
    """Return the hint for a name that is not a preset: the nearest one, or the range of ``depth-N``."""
    if name.startswith("depth-"):
        return f"N of depth-N goes from 1 to {DEEPEST}, as in depth-12 or depth-12-moe"
    close = nearest(name, preset_names())
    return f"did you mean the preset '{close}'?" if close else None


def keys_of(text: str) -> set[str]:
    """Return the top-level keys of a YAML text; none where it is not a mapping."""
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


def _folder(name: str) -> Traversable:
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
