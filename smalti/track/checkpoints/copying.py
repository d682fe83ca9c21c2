"""Copies a checkpoint to another place, once and by command; ``background.py`` does so during training.

In a folder, every file is compared with its digest, and ``COMPLETE`` is written last. The copy is written below
``.step-NNNNNNNN.copy`` and renamed at the end. A copy that was interrupted continues: files that are there and match
their digests are not written again.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from smalti.base import store
from smalti.base.disk import writing
from smalti.base.errors import DataError
from smalti.base.objects import Requests
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.manifest import CONFIG
from smalti.track.checkpoints.names import complete

_CHUNK_BYTES = 1 << 22

Read = Callable[[int], None]
"""Called with the bytes of each file that is copied."""


def copy_to(checkpoint: Path, target: str, read: Read = lambda _: None) -> str:
    """Copy a checkpoint into ``target``, under its own name; returns the place of the copy.

    In an object store it has the form of ``copies.py``, with the ``config.yaml`` of its run; ``read`` is not called.
    Raises DataError where it is damaged or the target has checkpoints of another run.
    """
    reason = manifest.misplaced(checkpoint)
    if reason is not None:
        raise _damaged(checkpoint, reason)
    if store.is_local(target):
        return str(copy_to_folder(checkpoint, Path(target), read))
    config = checkpoint.parent.parent / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else manifest.read_state(checkpoint).get(CONFIG)
    check = partial(require_one_run, text, target)
    return Copies(target, Requests()).upload(checkpoint, config=text, check=check).url


def copy_to_folder(checkpoint: Path, target: Path, read: Read = lambda _: None) -> Path:
    """Copy a checkpoint into a folder, which is created, and return the path of the copy.

    A complete copy that verifies is left as it is. Raises DataError where the checkpoint is damaged or the folder has
    another checkpoint of this name or one of another run, RetryableError where its disk is full.
    """
    entries, reason = manifest.listed(checkpoint)
    if reason is not None:
        raise _damaged(checkpoint, reason)
    final = target / checkpoint.name
    if final.exists():
        _require_same(checkpoint, final, read)
        return final
    require_folder_of(manifest.read_state(checkpoint).get(CONFIG), target)
    temporary = target / f".{checkpoint.name}.copy"
    with writing(target):
        try:
            for entry in entries:
                _copy(checkpoint, temporary, entry)
                read(entry["bytes"])
        except DataError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for name in ("manifest.json", "COMPLETE"):
            store.write_text(temporary / name, store.read_text(checkpoint / name))
        os.replace(temporary, final)
    return final


def _require_same(checkpoint: Path, final: Path, read: Read) -> None:
    """Raise DataError unless ``final`` is a whole copy of ``checkpoint``."""
    same = (final / "COMPLETE").is_file() and store.read_text(final / "COMPLETE") == store.read_text(
        checkpoint / "COMPLETE"
    )
    reason = manifest.fault(final, read) if same else "it is another checkpoint, or not complete"
    if reason is not None:
        raise DataError(
            f"{final} exists and is not this checkpoint: {reason}",
            hint="name another folder, or delete that one first",
        )


def require_folder_of(config: str | None, target: Path) -> None:
    """Raise DataError where the folder has a checkpoint of another run than that of ``config``, or is of its run
    folder."""
    run = target.absolute().parent / "config.yaml"
    if run.is_file():
        require_one_run(config, target, run.read_text(encoding="utf-8"))
    for name in complete(target)[:1]:
        require_one_run(config, target, manifest.read_state(target / name).get(CONFIG))


def require_one_run(config: str | None, target: str | Path, there: str | None) -> None:
    """Raise DataError where two configs are of different runs; before and after a fork it is one run."""
    if config is None or there is None:
        return
    if all(
        manifest.of_another_run({CONFIG: saved}, other, str(target))
        for saved, other in ((config, there), (there, config))
    ):
        raise DataError(f"{target} has checkpoints of another run", hint="name another folder or store")


def _copy(root: Path, target: Path, entry: manifest.Entry) -> None:
    """Copy a file whole or not at all, unless it is there already. Raises DataError where it is damaged."""
    if manifest.first_mismatch(target, [entry]) is None:
        return
    try:
        with open(root / entry["name"], "rb") as file, store.open_write(target / entry["name"]) as output:
            shutil.copyfileobj(file, output, _CHUNK_BYTES)
    except FileNotFoundError as error:
        raise _damaged(root, f"{entry['name']} is missing") from error
    reason = manifest.first_mismatch(target, [entry])
    if reason is not None:
        raise _damaged(root, reason)


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} cannot be copied: {reason}", hint="'smalti runs checkpoints verify RUN' finds one that can be used"
    )
