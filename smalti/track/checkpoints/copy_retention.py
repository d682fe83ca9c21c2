"""Which copies of checkpoints a store keeps: by the rules of ``retention.py`` (``train.checkpoint.save_to_keep``).

Marks are objects beside the copy. Those of the checkpoints in the run folder are put there first, so that a copy is
protected also after the folder is lost; ``smalti runs checkpoints keep URL STEP --off`` removes one.
"""

import os
from functools import cache
from pathlib import Path

from smalti.base import store
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, REGISTERED, VERIFIED, is_mark
from smalti.track.checkpoints.names import best, complete, step_of
from smalti.track.checkpoints.retention import Keep, kept_names

REASON = "train.checkpoint.save_to_keep"


def prune_copies(copies: Copies, folder: Path, step: int, keep: Keep) -> None:
    """Delete the copies up to ``step`` that are not to be kept, oldest first.

    folder: the checkpoints of the run, whose marks are copied. Never deleted are the best one, and those that are
    protected or registered here or in the store. Raises what the store does.
    """
    names = [name for name in copies.complete() if step_of(name) <= step]
    marks_of = cache(copies.marks)  # a listing each, so only of those that it matters for
    for name in set(names) & set(complete(folder)):
        for mark in sorted(wanted - marks_of(name)) if (wanted := _marks(folder / name)) else ():
            copies.mark(name, mark)
            marks_of(name).add(mark)
    kept = kept_names(names, keep, lambda name: BLESSED in marks_of(name))
    for name in reversed(names):
        if name not in kept and step_of(name) != best(folder) and not _is_wanted(marks_of(name)):
            copies.remove(name)
            keep.report(step=step_of(name), path=store.join(copies.url, name), reason=REASON)


def roles(copies: Copies) -> dict[str, tuple[str, ...]]:
    """Return each complete copy, newest first, with what keeps it: as ``retention.roles``, without ``best``."""
    names = copies.complete()
    marks_of = {name: copies.marks(name) for name in names}
    blessed = next((name for name in names if BLESSED in marks_of[name]), None)

    def of(name: str) -> tuple[str, ...]:
        has = {
            "newest": name == names[0],
            "blessed": name == blessed,
            "registered": any(map(_is_registration, marks_of[name])),
            "protected": PROTECTED in marks_of[name],
        }
        return tuple(role for role, is_so in has.items() if is_so)

    return {name: of(name) for name in names}


def _marks(checkpoint: Path) -> set[str]:
    """Return the marks of a checkpoint that hold for its copies too."""
    try:
        return {name for name in os.listdir(checkpoint) if is_mark(name)} - {VERIFIED}
    except FileNotFoundError:  # the run has deleted it meanwhile
        return set()


def _is_registration(mark: str) -> bool:
    return mark.startswith(f"{REGISTERED}-")


def _is_wanted(marks: set[str]) -> bool:
    return PROTECTED in marks or any(map(_is_registration, marks))
