"""Resolve relative paths: of a recipe from the current directory, of a run folder from where the run was started.

So a run folder that was moved, copied, or is named from elsewhere still finds its data; paths on the command line are
relative to the current directory.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smalti.config.load import Additions, Loaded
    from smalti.config.model import ModelConfig
    from smalti.config.run import RunConfig

_PATHS = re.compile(
    r"(folder|(adapter\.)?init_from|tune\.distill\.teacher"
    r"|data\.(tokenizer|takedowns|fetch\.cache|heldout\.[^.=]+|sources\.[^.=]+(\.path)?))"
    r"=(.+)"
)


def load_run(recipe: str, overrides: Sequence[str] = (), *, tokenize: bool = True) -> "Loaded[RunConfig]":
    """Load the config of a run; without a section ``model`` it gets that of ``init_from``.

    For a section ``tune`` the examples are tokenized, unless an earlier command has. Without ``tokenize`` they are not:
    a duration in epochs of examples whose number is unknown then stays as it is, in a config that can only be shown.
    """
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.config.tune import UNKNOWN_STEPS, TuneRecipe

    complete = partial(_with_examples, tokenize=tokenize)
    loaded = load(RunConfig, recipe, overrides, origin_model=_model_of, complete=complete)
    if tokenize or loaded.config.train.duration != UNKNOWN_STEPS:
        return loaded
    written, key = load(TuneRecipe, recipe, overrides), "train.duration"
    train = loaded.config.train.model_copy(update={"duration": written.config.train["duration"]})
    origins = {**loaded.origins, key: written.origins[key]}
    return replace(loaded, config=loaded.config.model_copy(update={"train": train}), origins=origins)


def _with_examples(
    values: "Mapping[str, Any]", origins: "Mapping[tuple[str | int, ...], str]", *, tokenize: bool
) -> "Additions":
    if not values.get("tune"):
        return {}, ""
    from smalti.tune.prepare import complete

    return complete(values, origins, tokenize=tokenize)


def _model_of(source: str) -> "ModelConfig":
    from smalti.train.origin import model_of

    return model_of(source)


def enter(recipe: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Change to the directory that the relative paths of a run folder's config start from; for a recipe do nothing.

    Returns the recipe and overrides as valid in that directory. Raises DataError if data is in neither directory.
    """
    from smalti.base.errors import DataError
    from smalti.config.find import find_recipe
    from smalti.config.run import RunConfig
    from smalti.track.provenance import directories, directory_of

    recipe_file = find_recipe(recipe, fields=RunConfig.model_fields)
    current = os.getcwd()
    if recipe_file.run is None or directories(recipe_file.run)[0] == current:
        return recipe, list(overrides)
    typed = [_absolute(override) for override in overrides]
    paths = _relative_paths(load_run(recipe, typed).config)
    begin = directory_of(recipe_file.run, paths.values()) if paths else current
    if begin is None:
        places = directories(recipe_file.run)
        field, path = next(
            (field, path) for field, path in paths.items() if directory_of(recipe_file.run, [path]) is None
        )
        raise DataError(
            f"{field} = {path} does not exist: {recipe_file.run} was started in {places[0]}, from where relative "
            f"paths of its config start; nor is it in {current}",
            allowed="the files where they were when the run was started, or below the current directory",
            hint=f"cd to the directory that holds {path}, and name the run by its path from there",
        )
    if begin == current:
        return recipe, list(overrides)
    print(f"{recipe_file.run}: relative paths of its config start from {begin}, where it was started", file=sys.stderr)
    os.chdir(begin)
    return os.path.join(current, recipe), typed


def placed(run: str, folders: Mapping[str, str]) -> dict[str, str]:
    """Return folders of ``run``'s config as paths from the current directory."""
    from smalti.track.provenance import directory_of

    relative = [path for path in folders.values() if _is_relative(path)]
    begin = directory_of(run, relative) or os.getcwd()
    moved = begin != os.getcwd()
    return {name: os.path.join(begin, path) if moved and path in relative else path for name, path in folders.items()}


def _relative_paths(config: "RunConfig") -> dict[str, str]:
    """Return field -> relative path of everything that a run reads when it resumes."""
    data = config.data
    paths = {f"data.sources.{name}": source.path for name, source in data.sources.items()}
    paths |= {f"data.heldout.{name}": path for name, path in data.heldout.items()}
    names = {"base": "init_from", "teacher": "tune.distill.teacher"}
    paths |= {names[name]: path for name, path in config.frozen_origins.items()}
    if config.adapter is not None:
        paths |= {"adapter.init_from": config.adapter.init_from or ""}
    paths |= {"data.takedowns": data.takedowns or "", "data.tokenizer": data.tokenizer or ""}
    return {field: path for field, path in paths.items() if path and _is_relative(path)}


def _is_relative(path: str) -> bool:
    from smalti.base import store

    return store.is_local(path) and not os.path.isabs(path)


def _absolute(override: str) -> str:
    """Return an override with its path made absolute if the path exists; a run folder need not exist."""
    match = _PATHS.fullmatch(override)
    if match is None or not _is_relative(path := match[match.lastindex or 0]):
        return override
    key = override.removesuffix(path)
    return key + os.path.abspath(path) if key == "folder=" or os.path.exists(path) else override
