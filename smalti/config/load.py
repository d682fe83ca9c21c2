"""Loads a frozen config from YAML and ``a.b=value`` overrides, with the origin of each value.

Precedence: command line, recipe, its one ``base:``, model preset, default. Mappings are merged key by key; lists and
plain values replace; null removes an entry with a free name (a source, a weight). A preset on the command line replaces
the whole model of the recipe. A preset's ``train:`` section has lower precedence than the recipe's. Nothing is
interpolated or read from the environment.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from smalti.base.errors import UserError
from smalti.config import context
from smalti.config.depth import rate_of_batch
from smalti.config.find import DEPTH_PRESETS, find_preset, find_recipe, preset_names
from smalti.config.model import ModelConfig
from smalti.config.problems import COMMAND_LINE, as_user_error
from smalti.config.run import JobConfig
from smalti.config.schema import Config
from smalti.config.show import dump, flatten, json_schema, show
from smalti.config.yaml_lines import MAX_LEVELS, Path, Tree, dotted, inline, parse, paths_of

__all__ = ["Loaded", "dump", "flatten", "from_dict", "json_schema", "load", "load_text", "show"]

DEFAULT = "default"

C = TypeVar("C", bound=Config)
Additions = tuple[Mapping[str, Any], str]
"""Nested values to add to a recipe, and their origin."""


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A validated config and the origins of its values."""

    config: C
    origins: dict[str, str]
    """Dotted key -> ``recipe.yaml:LINE``, ``preset NAME:LINE``, ``command line`` or ``default``."""
    path: str
    """The file that was loaded."""


def load(
    config_class: type[C],
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    origin_model: Callable[[str], ModelConfig] | None = None,
    complete: Callable[[Mapping[str, Any], Mapping[Path, str]], Additions] | None = None,
) -> Loaded[C]:
    """Load a recipe (file, run folder, or name in the package). Raises one UserError with all problems.

    origin_model: function that returns the model of an origin ``init_from``, for a recipe whose section ``model`` is
    absent or lacks required fields.
    complete: function that computes further values, with their origin, from those of a recipe and their origins; not
    called for a run folder, which has them.
    """
    source = find_recipe(name_or_path, fields=config_class.model_fields)
    tree = _mapping(parse(source.text, source.label))
    if source.run is not None and issubclass(config_class, JobConfig):
        tree.value.pop("folder", None)
        if not any(override.startswith(("name=", "folder=")) for override in overrides):
            _merge(tree, ("folder",), source.run, {("folder",): "where the run is"})
    tree = _with_base(config_class, tree, source.path)
    if origin_model is not None:
        tree = _with_origin(tree, overrides, origin_model)
    tree = _resolved(config_class, tree, overrides)
    if complete is not None and source.run is None:
        values, origin = complete(tree.value, tree.origins)
        _merge(tree, (), values, dict.fromkeys(paths_of(values), origin))
    return Loaded(*_validate(config_class, tree, source.label), source.path)


def from_dict(
    config_class: type[C],
    value: Mapping[str, Any],
    label: str = "config",
    overrides: Sequence[str] = (),
    *,
    origins: Mapping[Path, str] | None = None,
) -> Loaded[C]:
    """Validate plain values (from Python or a stored config), with ``overrides`` and the same errors.

    ``origins``: of the values, for errors; absent: ``label``.
    """
    tree = Tree(copy.deepcopy(dict(value)), {**dict.fromkeys(paths_of(value), label), **(origins or {})})
    return Loaded(*_validate(config_class, _resolved(config_class, tree, overrides), label), label)


def load_text(config_class: type[C], text: str, label: str) -> Loaded[C]:
    """Load the text of a resolved config (``dump``); ``label`` is its place, for errors."""
    return Loaded(*_validate(config_class, parse(text, label), label), label)


def _resolved(config_class: type[BaseModel], tree: Tree, overrides: Sequence[str]) -> Tree:
    """Return the tree with the command line applied over it and the presets under it."""
    from_command_line = Tree({})
    sections = _preset_sections(config_class)
    for override in overrides:
        _apply_override(from_command_line, override)
    # The overrides are first applied alone, because a preset among them replaces the recipe's whole model before the
    # others apply.
    for section in sections:
        if _names_preset(from_command_line, section) and not _names_preset(tree, section):
            _merge(tree, section, None, {})
            _set(tree, section, {})
    for override in overrides:
        _apply_override(tree, override, config_class)
    for section in sections:
        tree = _with_preset(tree, section)
    return tree


def _names_preset(tree: Tree, section: Path) -> bool:
    value = _get(tree.value, section)
    return isinstance(value, dict) and "preset" in value


def _validate(config_class: type[C], tree: Tree, label: str) -> tuple[C, dict[str, str]]:
    try:
        config = config_class.model_validate(tree.value)
    except ValidationError as error:
        raise as_user_error(error, config_class, tree.value, tree.origins, label) from error
    written = {dotted(path): origin for path, origin in tree.origins.items()}
    return config, {key: written.get(key, DEFAULT) for key in flatten(config.model_dump(mode="json"))}


def _with_origin(tree: Tree, overrides: Sequence[str], origin_model: Callable[[str], ModelConfig]) -> Tree:
    """Return the tree over the model of ``init_from``, if its section ``model`` lacks required fields."""
    typed, section = Tree({}), ("model",)
    for override in overrides:
        _apply_override(typed, override)
    source = typed.value.get("init_from", tree.value.get("init_from"))
    sections = [_get(each.value, section) or {} for each in (tree, typed)]
    if not isinstance(source, str) or not all(isinstance(each, dict) for each in sections):
        return tree
    stated = {**sections[0], **sections[1]}
    if "preset" in stated or stated.keys() >= set(context.REQUIRED):
        return tree
    scalings = [each.get("rope_scaling") or {} for each in sections]
    if all(isinstance(each, dict) for each in scalings) and any(scalings):
        stated["rope_scaling"] = {**scalings[0], **scalings[1]}
    try:
        value = context.below(stated, origin_model(source))
    except UserError as error:
        hint = f"{error.hint or 'name a model'}; or write the section ('smalti config model MODEL' prints one)"
        lacks = "the section 'model:' is not complete, and the rest is" if stated else "there is no section 'model:'"
        what = f"{lacks} to take from init_from: {error.message}"
        raise type(error)(what, allowed=error.allowed, hint=hint) from error
    under = Tree({}, {(*section, *path): f"init_from: {source}" for path in paths_of(value)})
    _set(under, section, value)
    _merge(under, (), tree.value, tree.origins)
    return under


def _mapping(tree: Tree) -> Tree:
    if tree.value is None:
        return Tree({}, {})
    if not isinstance(tree.value, dict):
        raise UserError(
            f"{tree.origins[()]}: the file contains {inline(tree.value)[:80]}", allowed="'key: value' lines"
        )
    return tree


def _with_base(config_class: type[BaseModel], tree: Tree, path: str) -> Tree:
    name = tree.value.pop("base", None)
    where = tree.origins.pop(("base",), path)
    if name is None:
        return tree
    if not isinstance(name, str):
        raise UserError(f"{where}: base = {inline(name)} is not allowed", allowed="one path or recipe name")
    try:
        source = find_recipe(name, beside=path)
    except UserError as error:
        raise UserError(f"{where}: base: {error.message}", allowed=error.allowed, hint=error.hint) from error
    base = _mapping(parse(source.text, source.label))
    if source.run is not None:
        base.value.pop("folder", None)
    if "base" in base.value:
        raise UserError(
            f"{where}: base = {name} has a base itself ({inline(base.value['base'])})",
            allowed="one level: a recipe without a base",
            hint=f"'smalti config show {name} > FILE' writes it out with its base; base: FILE",
        )
    _merge(base, (), tree.value, tree.origins, config_class)
    return base


def _merge(
    into: Tree, path: Path, value: Any, origins: Mapping[Path, str], config_class: type[BaseModel] | None = None
) -> None:
    """Merge ``value`` (with its absolute ``origins``) into ``into`` at ``path``.

    With ``config_class`` a null removes an entry with a free name, such as a source.
    """
    current = _get(into.value, path)
    if isinstance(value, dict) and isinstance(current, dict):
        for key, child in value.items():
            _merge(into, (*path, key), child, origins, config_class)
        return
    if value is None and config_class is not None and current is not None and _is_entry(config_class, path):
        del _get(into.value, path[:-1])[path[-1]]
        for old in [origin for origin in into.origins if origin[: len(path)] == path]:
            del into.origins[old]
        return
    for old in [origin for origin in into.origins if origin[: len(path)] == path]:
        del into.origins[old]
    _set(into, path, value)
    into.origins.update({key: origin for key, origin in origins.items() if key[: len(path)] == path})


def _is_entry(kind: Any, path: Path) -> bool:
    """Return whether ``path`` in a config of ``kind`` is an entry of a mapping that may not be null itself."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(path[0]))
        return field is not None and len(path) > 1 and _is_entry(field.annotation, path[1:])
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        return type(None) not in get_args(value) if len(path) == 1 else _is_entry(value, path[1:])
    inside = path[1:] if get_origin(kind) is tuple else path
    return bool(inside) and any(_is_entry(member, inside) for member in get_args(kind))


def _apply_override(tree: Tree, override: str, config_class: type[BaseModel] | None = None) -> None:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*", key):
        raise UserError(
            f"{COMMAND_LINE}: '{_short(override)}' is not an override",
            allowed="key.of.section=value, as in train.optimizer.lr=3e-4",
            hint=f"write '{override.lstrip('-').replace(' ', '=', 1)}'" if override.startswith("--") else None,
        )
    value = parse(text, f"{COMMAND_LINE}: {_short(override)}", lines=False).value
    path: list[str | int] = []
    if key.count(".") >= MAX_LEVELS:
        raise UserError(f"{COMMAND_LINE}: {_short(key)} has {key.count('.') + 1} levels", allowed=f"up to {MAX_LEVELS}")
    for part in key.split("."):
        section = _get(tree.value, tuple(path))
        path.append(int(part) if isinstance(section, list) and part.isdigit() else part)
        if isinstance(section, list) and (isinstance(path[-1], str) or path[-1] >= len(section)):
            raise UserError(
                f"{COMMAND_LINE}: {override}: '{part}' is not an item of {dotted(tuple(path[:-1]))}",
                allowed=f"0 to {len(section) - 1}",
            )
    paths = [tuple(path), *(tuple(path) + below for below in paths_of(value))]
    _merge(tree, tuple(path), value, dict.fromkeys(paths, COMMAND_LINE), config_class)


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _preset_sections(config_class: type[BaseModel], path: Path = ()) -> list[Path]:
    """Return the paths of the sections of ``config_class`` that are a ModelConfig, where ``preset:`` is allowed."""
    if config_class is ModelConfig:
        return [path]
    sections: list[Path] = []
    for name, field in config_class.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                sections += _preset_sections(kind, (*path, name))
    return sections


def _with_preset(tree: Tree, section: Path) -> Tree:
    value = _get(tree.value, section)
    if not isinstance(value, dict) or "preset" not in value:
        return tree
    where = tree.origins.get((*section, "preset"), dotted(section) or "config")
    name = value["preset"]
    if not isinstance(name, str):
        raise UserError(
            f"{where}: {dotted((*section, 'preset'))} = {inline(name)} is not allowed",
            allowed=", ".join([*preset_names(), *DEPTH_PRESETS]),
        )
    source = find_preset(name, where=where)
    preset = _with_preset(_mapping(parse(source.text, source.label)), ())
    train = {"train": preset.value.pop("train")} if "train" in preset.value else {}
    under = Tree(train if section else {}, {})
    _set(under, section, preset.value)
    under.origins = {
        path if path[:1] == ("train",) else (*section, *path): origin for path, origin in preset.origins.items() if path
    }
    del value["preset"]
    _scale_preset_lr(under, _get(tree.value, ("train", "global_batch_tokens")))
    _merge(under, (), tree.value, tree.origins)
    under.origins = {**tree.origins, **under.origins}
    under.origins.pop((*section, "preset"), None)
    return under


def _scale_preset_lr(preset: Tree, batch_tokens: Any) -> None:
    """Adapt a preset's learning rate to the batch of the recipe (``rate_of_batch``)."""
    lr = ("train", "optimizer", "lr")
    preset_tokens = _get(preset.value, ("train", "global_batch_tokens"))
    if preset_tokens is None or not isinstance(batch_tokens, int) or not 0 < batch_tokens < preset_tokens:
        return
    _set(preset, lr, rate_of_batch(_get(preset.value, lr), of_tokens=preset_tokens, batch_tokens=batch_tokens))
    preset.origins[lr] += f", for a batch of {batch_tokens:,} tokens"


def _get(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            return None
    return value


def _set(tree: Tree, path: Path, value: Any) -> None:
    if not path:
        tree.value = value
        return
    section: Any = tree.value
    for depth, part in enumerate(path[:-1]):
        below = _get(section, (part,))
        if not isinstance(below, (dict, list)):
            below = {}
            section[part] = below
            tree.origins[path[: depth + 1]] = COMMAND_LINE
        section = below
    section[path[-1]] = value
