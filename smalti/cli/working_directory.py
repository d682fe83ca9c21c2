"""Where relative paths begin: for a recipe where the command is given, for a run folder where the run was started.

So a run folder that was moved, copied, or is named from elsewhere finds its data; paths that are typed stay those of
the directory in which they are typed.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.load import Loaded
    from smalti.config.model import ModelConfig
    from smalti.config.run import RunConfig

_PATHS = re.compile(
    r"(folder|init_from|data\.(tokenizer|takedowns|fetch\.cache|heldout\.[^.=]+|sources\.[^.=]+(\.path)?))=(.+)"
)


def load_run(recipe: str, overrides: Sequence[str] = ()) -> "Loaded[RunConfig]":
    """The config of a run, as ``load`` gives it; without a section ``model`` it has that of ``init_from``."""
    from smalti.config.load import load
    from smalti.config.run import RunConfig

    return load(RunConfig, recipe, overrides, model_of=_model_of)


def _model_of(source: str) -> "ModelConfig":
    from smalti.train.origin import model_of

    return model_of(source)


def enter(recipe: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Change to the directory that relative paths in the config of a run folder begin in; returns the arguments as they
    are to be read there. Nothing happens for a recipe. DataError where data is neither there nor here."""
    from smalti.base.errors import DataError
    from smalti.config.find import find_recipe
    from smalti.config.run import RunConfig
    from smalti.track.provenance import directories, directory_of

    found = find_recipe(recipe, fields=RunConfig.model_fields)
    here = os.getcwd()
    if found.run is None or directories(found.run)[0] == here:
        return recipe, list(overrides)
    typed = [_absolute(override) for override in overrides]
    paths = _relative_paths(load_run(recipe, typed).config)
    begin = directory_of(found.run, paths.values()) if paths else here
    if begin is None:
        places = directories(found.run)
        field, path = next((field, path) for field, path in paths.items() if directory_of(found.run, [path]) is None)
        raise DataError(
            f"{field} = {path} does not exist: {found.run} was started in {places[0]}, where relative paths of its "
            f"config begin; nor is it in {here}",
            allowed="the files where they were when the run was started, or below the present directory",
            hint=f"cd to the directory that holds {path}, and name the run by its path from there",
        )
    if begin == here:
        return recipe, list(overrides)
    print(f"{found.run}: relative paths of its config begin in {begin}, where it was started", file=sys.stderr)
    os.chdir(begin)
    return os.path.join(here, recipe), typed


def placed(run: str, folders: Mapping[str, str]) -> dict[str, str]:
    """Folders that the config of ``run`` names, as they are found from here."""
    from smalti.track.provenance import directory_of

    relative = [path for path in folders.values() if _is_relative(path)]
    begin = directory_of(run, relative) or os.getcwd()
    moved = begin != os.getcwd()
    return {name: os.path.join(begin, path) if moved and path in relative else path for name, path in folders.items()}


def _relative_paths(config: "RunConfig") -> dict[str, str]:
    """Field -> relative path, of what a run reads whenever it goes on."""
    data = config.data
    paths = {f"data.sources.{name}": source.path for name, source in data.sources.items()}
    paths |= {f"data.heldout.{name}": path for name, path in data.heldout.items()}
    paths |= {"data.takedowns": data.takedowns or "", "data.tokenizer": data.tokenizer or ""}
    return {field: path for field, path in paths.items() if path and _is_relative(path)}


def _is_relative(path: str) -> bool:
    from smalti.base import store

    return store.is_local(path) and not os.path.isabs(path)


def _absolute(override: str) -> str:
    """An override by a path that exists here (a run folder need not) as one that holds everywhere."""
    match = _PATHS.fullmatch(override)
    if match is None or not _is_relative(path := match[match.lastindex or 0]):
        return override
    key = override.removesuffix(path)
    return key + os.path.abspath(path) if key == "folder=" or os.path.exists(path) else override
