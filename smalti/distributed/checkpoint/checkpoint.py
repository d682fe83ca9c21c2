"""Sharded checkpoints: each rank writes its own part, any number of ranks reads them back.

    step-00001000/{shards/, train_state.json, manifest.json, COMPLETE}      latest (a hint: the name of the newest)

A folder without ``COMPLETE`` is no checkpoint. ``manifest.json`` holds the SHA-256 of every file, and files are checked
before they are read. This guards against damage, not against a forged manifest. Only tensors are saved through
torch.distributed.checkpoint (DCP), everything else as JSON. docs/concepts/train/checkpoints.md.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smalti.base import log, store
from smalti.base.disk import room
from smalti.base.errors import DataError, RetryableError
from smalti.base.hashing import sha256_file
from smalti.distributed.checkpoint.shard_reader import ShardReader
from smalti.distributed.group.world import broadcast_from_rank0, together
from smalti.track.checkpoint_names import best, complete, is_name, step_of

T = TypeVar("T")

FORMAT = 1
Reject = Callable[[str, str], None]
"""Called with (checkpoint, reason) for each checkpoint that is passed over."""


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` updates."""
    return f"step-{step:08d}"


# ---- saving ---------------------------------------------------------------------------------------------------------


def save(folder: str | Path, step: int, tensors: dict[str, Tensor], train_state: dict[str, Any], *, keep: int) -> str:
    """Write checkpoint ``step`` below ``folder`` from all ranks, then delete all but the newest ``keep``.

    tensors: name -> this rank's part (DTensor) or a tensor that all ranks hold. Raises RetryableError on every rank
    where any of them could not write; the checkpoints that were there before are untouched then.
    """
    final = Path(folder) / folder_name(step)
    temporary = final.with_name(f".{final.name}.tmp")
    failure = _worst(_attempt(lambda: _make_empty(temporary)) if _first() else None)
    if failure is None:
        failure = _worst(_attempt(lambda: _write_shards(temporary, tensors)))
    entries_of_rank: list[dict[str, Any]] = []
    if failure is None:
        failure = _worst(_attempt(lambda: entries_of_rank.extend(_entries_of_rank(temporary))))
    if failure is None:
        entries = _gather(entries_of_rank)
        failure = _worst(_attempt(lambda: _publish(temporary, final, train_state, entries)) if _first() else None)
    if failure is not None:
        if _first():
            shutil.rmtree(temporary, ignore_errors=True)
        raise RetryableError(
            f"checkpoint {final} could not be saved: {failure}; {room(folder)}",
            hint=f"free space or fix the disk under {folder}, then run the same command: it resumes from the "
            "checkpoint before",
        )
    if _first():
        unpruned = _attempt(lambda: _prune(Path(folder), step, keep))
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


def _entries_of_rank(temporary: Path) -> list[dict[str, Any]]:
    """Return the manifest entries of the files that this rank wrote; rank 0 adds DCP's metadata."""
    paths = sorted((temporary / "shards").glob(f"__{_rank()}_*"))
    if _first():
        paths.append(temporary / "shards" / ".metadata")
    return [_entry(temporary, path) for path in paths]


def _entry(root: Path, path: Path) -> dict[str, Any]:
    return {"name": str(path.relative_to(root)), "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _publish(temporary: Path, final: Path, train_state: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    store.write_json(temporary / "train_state.json", train_state)
    entries = [*entries, _entry(temporary, temporary / "train_state.json")]
    store.write_json(temporary / "manifest.json", {"format": FORMAT, "files": entries})
    store.write_text(temporary / "COMPLETE", sha256_file(temporary / "manifest.json") + "\n")
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    store.write_text(final.parent / "latest", final.name + "\n")


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest ``keep`` up to ``step``, and the best; newer ones were not written by this attempt."""
    protected = best(folder)
    for old in [name for name in complete(folder) if step_of(name) <= step][keep:]:
        if step_of(old) == protected:
            continue
        if (folder / old).is_symlink():  # its target may belong to another run
            (folder / old).unlink()
            continue
        (folder / old / "COMPLETE").unlink()
        shutil.rmtree(folder / old)


# ---- finding --------------------------------------------------------------------------------------------------------


def newest(folder: str | Path, reject: Reject | None = None, *, shared: bool = False) -> str | None:
    """Return the newest checkpoint below ``folder`` whose every file matches its digest, or None if there is none.

    The checkpoint is read once for that; older ones only where newer ones fail. shared: all ranks of the world call
    this and read a part each, with the same result. Otherwise one process reads everything. reject: is called with each
    checkpoint that fails and the reason; by default a warning is logged. DataError where there are checkpoints and none
    can be used: to start from the beginning is then the user's decision.
    """
    reasons: list[str] = []
    for name in broadcast_from_rank0(lambda: complete(folder)) if shared else complete(folder):
        path = str(Path(folder) / name)
        reason = fault(path, shared=shared)
        if reason is None:
            return path
        reasons.append(f"{name}: {reason}")
        (reject or _warn)(path, reason)
    if reasons:
        raise DataError(
            f"no checkpoint in {folder} can be used: {'; '.join(reasons)}",
            allowed="at least one whose files match its manifest",
            hint="restore one from a copy, or start anew with name=NEW_NAME; nothing was changed",
        )
    return None


def _warn(path: str, reason: str) -> None:
    log.get("checkpoint").warning("%s is skipped: %s", path, reason)


def set_aside_newer(path: str | Path) -> list[str]:
    """Rename the checkpoints beside ``path`` that are newer to ``rejected-step-...``, and return their new paths.

    They are damaged, or they would have been chosen. Training continues from ``path`` and will write those steps again.
    """
    folder = Path(path).parent
    moved = []
    for name in complete(folder):
        if step_of(name) > step_of(path):
            aside = folder / f"rejected-{name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder / name, aside)
            moved.append(str(aside))
    return moved


def fault(path: str | Path, *, shared: bool = False) -> str | None:
    """Return why the checkpoint at ``path`` is damaged, or None where every file matches its digest.

    shared: all ranks of the world call this, each reads a part of the files, and all get the first reason of any rank.
    DataError for a format of another version; RetryableError where a file exists and cannot be read (permission, I/O).
    """
    root = Path(path)
    if not shared:
        entries, reason = _listed(root)
        return reason or _first_mismatch(root, entries) or _misnamed(root)
    entries, reason = broadcast_from_rank0(lambda: _listed(root))
    if reason is not None:
        return reason
    part = _part(entries, dist.get_rank(), dist.get_world_size())
    return _worst(together(lambda: _first_mismatch(root, part))) or broadcast_from_rank0(lambda: _misnamed(root))


def _part(entries: list[dict[str, Any]], rank: int, ranks: int) -> list[dict[str, Any]]:
    """Return the files that ``rank`` verifies: shards are distributed by size, and rank 0 reads all other files."""
    by_size = sorted(entries, key=lambda entry: -int(entry["bytes"]))
    shards = [entry for entry in by_size if Path(entry["name"]).name.startswith("__")]
    rest = [entry for entry in by_size if entry not in shards]
    return shards[rank::ranks] + (rest if rank == 0 else [])


def _listed(root: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the files that the manifest lists, or why the manifest is not valid."""

    def look() -> tuple[list[dict[str, Any]], str | None]:
        if not (root / "COMPLETE").exists():
            return [], "it has no COMPLETE mark"
        if store.read_text(root / "COMPLETE").strip() != sha256_file(root / "manifest.json"):
            return [], "manifest.json does not match its digest in COMPLETE"
        manifest = store.read_json(root / "manifest.json")
        if manifest["format"] != FORMAT:
            raise DataError(
                f"checkpoint {root} has format {manifest['format']}; this version of Smalti reads {FORMAT}",
                hint="use the version that wrote it (provenance.json names it), or start anew with name=NEW_NAME",
            )
        return [{key: entry[key] for key in ("name", "bytes", "sha256")} for entry in manifest["files"]], None

    listed, reason = _guarded(root, look)
    return listed or ([], reason)


def _first_mismatch(root: Path, entries: list[dict[str, Any]]) -> str | None:
    def look() -> str | None:
        return next(filter(None, (_mismatch(root, entry) for entry in entries)), None)

    mismatch, reason = _guarded(root, look)
    return mismatch or reason


def _misnamed(root: Path) -> str | None:
    """Return why a valid checkpoint is not the one that its folder is named for, if so."""
    if not is_name(root.name):
        return None
    step = read_state(root).get("step", step_of(root))
    return (
        None
        if step == step_of(root)
        else f"it is the checkpoint of step {step}, in a folder that is named for another step"
    )


def _guarded(root: Path, look: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of ``look``, or why the files that it reads are damaged."""
    try:
        return look(), None
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    except OSError as error:
        raise RetryableError(
            f"checkpoint {root} cannot be read: {error}",
            hint="restore the access to it, then run the same command again",
        ) from error


def _mismatch(root: Path, entry: dict[str, Any]) -> str | None:
    file = root / entry["name"]
    if not file.exists():
        return f"{entry['name']} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{entry['name']} has {file.stat().st_size} bytes; {entry['bytes']} were written"
    return None if sha256_file(file) == entry["sha256"] else f"{entry['name']} does not match its digest"


# ---- loading --------------------------------------------------------------------------------------------------------


def read_state(path: str | Path) -> dict[str, Any]:
    """Return the JSON state that was saved with the tensors."""
    state: dict[str, Any] = store.read_json(Path(path) / "train_state.json")
    return state


def load(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place, called by all ranks; their layout may differ from the one that was saved.

    Rank 0 alone reads the metadata; each rank reads its own parts of the tensors.
    """
    reader = ShardReader(Path(path) / "shards")
    reader.share()
    saved = reader.read_metadata().state_dict_metadata
    _check_names(path, saved, tensors)
    dcp.load(dict(tensors), storage_reader=reader)


def shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the model's weights, by its name in the ``state_dict``; digests are not checked."""
    return {name: tuple(entry.size) for name, entry in _stored_model(ShardReader(Path(path) / "shards")).items()}


def _stored_model(reader: ShardReader) -> dict[str, TensorStorageMetadata]:
    return {
        name.removeprefix("model."): entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


class StoredModel(Mapping[str, Tensor]):
    """The model's weights in a checkpoint, by the names of its ``state_dict``: full, plain CPU tensors.

    Each is read on access, by one process alone. DataError for a damaged checkpoint, for which every file is read once.
    """

    def __init__(self, path: str | Path) -> None:
        problem = fault(path)
        if problem is not None:
            raise DataError(f"checkpoint {path} cannot be used: {problem}", hint="name another step, or train again")
        self._reader = ShardReader(Path(path) / "shards")
        self._saved = _stored_model(self._reader)

    def __getitem__(self, name: str) -> Tensor:
        saved = self._saved[name]
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        with warnings.catch_warnings():  # one process reads alone on purpose
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({f"model.{name}": tensor}, storage_reader=self._reader, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def read_model(path: str | Path) -> dict[str, Tensor]:
    """Return all weights of ``StoredModel`` at once."""
    return dict(StoredModel(path))


def _check_names(path: str | Path, saved: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in saved:
            raise DataError(f"checkpoint {path} has no tensor '{name}'", hint="it belongs to another model or version")
        if tuple(saved[name].size) != tuple(tensor.shape):
            raise DataError(
                f"tensor '{name}' of checkpoint {path} has shape {tuple(saved[name].size)}; "
                f"the model needs {tuple(tensor.shape)}"
            )


# ---- agreement of the ranks -----------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first() -> bool:
    return _rank() == 0


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except CheckpointException as error:
        return "; ".join(sorted({str(cause[0]) for cause in error.failures.values()}))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _gather(items: list[Any]) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def _worst(failure: str | None) -> str | None:
    """Return the first failure of any rank, on all ranks."""
    return next((text for text in _gather([failure]) if text is not None), None)
