"""Which copies of checkpoints a store keeps: by the rules of ``retention.py`` (``train.checkpoint.save_to_keep``).

Marks are objects beside the copy. Those of the checkpoints in the run folder are put there first, so that a copy is
protected also after the folder is lost; ``smalti runs checkpoints keep URL STEP --off`` removes one. The object
``best`` beside the copies names the best one with its score, which a run that lost its folder no longer knows.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.objects import open_folder
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, REGISTERED, VERIFIED, is_mark, is_wanted
from smalti.track.checkpoints.names import BEST, best, complete, folder_name, is_name, step_of
from smalti.track.checkpoints.retention import Keep, kept_names
from smalti.track.events import read_events

REASON = "train.checkpoint.save_to_keep"


def prune_copies(copies: Copies, folder: Path, step: int, keep: Keep) -> None:
    """Delete the copies up to ``step`` that are not to be kept, oldest first.

    folder: the checkpoints of the run, whose marks are copied. Never deleted are the best one (the run's and the
    store's), and those that are protected or registered here or in the store, where marks are read just before each
    deletion. Raises what the store does, and DataError where its ``best`` is damaged.
    """
    names = [name for name in copies.complete() if step_of(name) <= step]
    marks_of = cache(copies.marks)  # a listing each, so only of those that it matters for
    for name in set(names) & set(complete(folder)):
        for mark in sorted(wanted - marks_of(name)) if (wanted := _marks(folder / name)) else ():
            copies.mark(name, mark)
            marks_of(name).add(mark)
    kept = kept_names(names, keep, lambda name: BLESSED in marks_of(name)) | _best_names(copies, folder, names)
    for name in reversed(names):
        if name not in kept and not is_wanted(copies.marks(name)):  # a command may have protected it meanwhile
            copies.remove(name)
            keep.report(step=step_of(name), path=store.join(copies.url, name), reason=REASON)


def roles(copies: Copies) -> dict[str, tuple[str, ...]]:
    """Return each complete copy, newest first, with what keeps it: as ``retention.roles``."""
    names = copies.complete()
    stored = read_best(copies)
    marks_of = {name: copies.marks(name) for name in names}
    blessed = next((name for name in names if BLESSED in marks_of[name]), None)

    def of(name: str) -> tuple[str, ...]:
        has = {
            "newest": name == names[0],
            "best": stored is not None and name == stored.name,
            "blessed": name == blessed,
            "registered": any(map(_is_registration, marks_of[name])),
            "protected": PROTECTED in marks_of[name],
        }
        return tuple(role for role, is_so in has.items() if is_so)

    return {name: of(name) for name in names}


class Best(NamedTuple):
    """The contents of ``best``."""

    name: str
    metric: str
    value: float
    """A lower one is better."""


def read_best(copies: Copies) -> Best | None:
    """Return the best copy that the store knows; None where it knows none. Raises DataError where it is damaged."""
    try:
        data = open_folder(copies.url, copies.requests).get(BEST)
    except FileNotFoundError:
        return None
    try:
        value = json.loads(data)
        stored = Best(str(value["name"]), str(value["metric"]), float(value["value"]))
        if is_name(stored.name):
            return stored
        reason = f"{stored.name!r} is no name of a checkpoint"
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise DataError(
        f"{store.join(copies.url, BEST)} is not valid: {reason}",
        hint="delete this object, after 'smalti runs checkpoints keep' of the best copy; the run writes it again",
    )


def set_aside(copies: Copies, name: str) -> None:
    """Make a damaged copy incomplete, so that its step can be copied again; it is the best one no longer."""
    copies.reject(name)
    stored = read_best(copies)
    if stored is not None and stored.name == name:
        open_folder(copies.url, copies.requests).delete([BEST])


def _best_names(copies: Copies, folder: Path, names: list[str]) -> set[str]:
    """Return the names of the best checkpoint of the run and of the store, after recording a better one there."""
    step = best(folder)
    here = None if step is None else _scored(folder, step)
    stored = read_best(copies)
    if stored is not None and stored.name not in copies.complete():  # it was deleted by command
        stored = None
    if here is not None and here.name in names and (stored is None or _replaces(here, stored)):
        if here != stored:
            open_folder(copies.url, copies.requests).put(BEST, (json.dumps(here._asdict()) + "\n").encode())
        stored = here
    return ({stored.name} if stored else set()) | (set() if step is None else {folder_name(step)})


def _replaces(new: Best, old: Best) -> bool:
    """Return whether a score is that of the same copy, or better, or of another metric."""
    return new.name == old.name or new.metric != old.metric or new.value < old.value


def _scored(folder: Path, step: int) -> Best | None:
    """Return the best checkpoint of a run with the score of its event; None where the events have none."""
    for event in reversed(read_events(folder.parent)):
        if event.get("event") == "checkpoint_best" and event.get("step") == step:
            return Best(folder_name(step), str(event["metric"]), float(event["value"]))
    return None


def _marks(checkpoint: Path) -> set[str]:
    """Return the marks of a checkpoint that hold for its copies too."""
    try:
        return {name for name in os.listdir(checkpoint) if is_mark(name)} - {VERIFIED}
    except FileNotFoundError:  # the run has deleted it meanwhile
        return set()


def _is_registration(mark: str) -> bool:
    return mark.startswith(f"{REGISTERED}-")
