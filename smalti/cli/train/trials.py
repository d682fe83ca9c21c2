"""Trials: the first steps of a run, trained in a folder that the next trial replaces."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.load import Loaded
    from smalti.config.run import RunConfig

FOLDER = "runs/.try"


def arguments(steps: int | None) -> list[str]:
    """Return the arguments of a trial for the ranks; empty if ``steps`` is None."""
    return [] if steps is None else ["--try", str(steps)]


def of(loaded: "Loaded[RunConfig]", steps: int | None) -> "Loaded[RunConfig]":
    """Return the config of a trial, in an empty folder and without trackers; unchanged if ``steps`` is None.

    The process that starts the ranks empties the folder. Raises UserError if another process trains in it, or if
    folder= was given.
    """
    from smalti.base.env import attempt_is_open, inside_world, world
    from smalti.base.errors import UserError
    from smalti.config.problems import COMMAND_LINE
    from smalti.track.run import RunFolder

    if steps is None:
        return loaded
    config = loaded.config
    folder = f"{FOLDER}/{config.name}"
    if loaded.origins.get("folder") == COMMAND_LINE:
        raise UserError(f"--try trains in {folder}, so folder={config.folder} has no effect", hint="leave folder= out")
    track = config.track.model_copy(update={"sinks": ()})
    if Path(folder).exists() and not attempt_is_open() and (not inside_world() or world().is_first):
        last = RunFolder(folder)
        last.take_lock()
        shutil.rmtree(folder)
        last.close()
    return replace(loaded, config=config.model_copy(update={"folder": folder, "track": track}))
