"""Saves checkpoints: each rank writes its own part, and a checkpoint appears whole or not at all.

Only tensors are saved through torch.distributed.checkpoint (DCP), everything else as JSON.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from smalti.base import log, store
from smalti.base.disk import room
from smalti.base.errors import RetryableError
from smalti.distributed.group.world import first_failure, gather, rank
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import folder_name
from smalti.track.checkpoints.retention import prune


def save(folder: str | Path, step: int, tensors: dict[str, Tensor], train_state: dict[str, Any], *, keep: int) -> str:
    """Write checkpoint ``step`` below ``folder`` from all ranks, then delete all but the newest ``keep``.

    tensors: name -> this rank's part (DTensor) or a tensor that all ranks hold. Raises RetryableError on every rank
    where any of them could not write; the checkpoints that were there before are untouched then.
    """
    final = Path(folder) / folder_name(step)
    temporary = final.with_name(f".{final.name}.tmp")
    failure = first_failure(_attempt(lambda: _make_empty(temporary)) if rank() == 0 else None)
    if failure is None:
        failure = first_failure(_attempt(lambda: _write_shards(temporary, tensors)))
    entries_of_rank: list[manifest.Entry] = []
    if failure is None:
        failure = first_failure(_attempt(lambda: entries_of_rank.extend(_entries_of_rank(temporary))))
    if failure is None:
        entries = gather(entries_of_rank)
        failure = first_failure(
            _attempt(lambda: _publish(temporary, final, train_state, entries)) if rank() == 0 else None
        )
    if failure is not None:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RetryableError(
            f"checkpoint {final} could not be saved: {failure}; {room(folder)}",
            hint=f"free space or fix the disk under {folder}, then run the same command: it resumes from the "
            "checkpoint before",
        )
    if rank() == 0:
        unpruned = _attempt(lambda: prune(Path(folder), step, keep))
        if unpruned is not None:
            log.get("checkpoint").warning("an old checkpoint in %s could not be deleted: %s", folder, unpruned)
    return str(final)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was moved must not be created again
    folder.mkdir()


def _write_shards(temporary: Path, tensors: dict[str, Tensor]) -> None:
    writer = dcp.FileSystemWriter(temporary / "shards", thread_count=1)
    dcp.save(dict(tensors), storage_writer=writer)


def _entries_of_rank(temporary: Path) -> list[manifest.Entry]:
    """Return the manifest entries of the files that this rank wrote; rank 0 adds DCP's metadata."""
    paths = sorted((temporary / "shards").glob(f"__{rank()}_*"))
    if rank() == 0:
        paths.append(temporary / "shards" / ".metadata")
    return [manifest.entry(temporary, path) for path in paths]


def _publish(temporary: Path, final: Path, train_state: dict[str, Any], entries: list[manifest.Entry]) -> None:
    manifest.write(temporary, train_state, entries)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    store.write_text(final.parent / "latest", final.name + "\n")


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except CheckpointException as error:
        return "; ".join(sorted({str(cause[0]) for cause in error.failures.values()}))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None
