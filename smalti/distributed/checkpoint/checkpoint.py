"""Sharded checkpoints: each rank writes its own part, any number of ranks reads them back.

    step-00001000/{shards/, train_state.json, manifest.json, COMPLETE}      latest (a hint: the name of the newest)

Guarantees: a checkpoint without ``COMPLETE`` does not exist; ``manifest.json`` holds the SHA-256 of every file and is
checked before anything is read; the newest checkpoint that verifies is found, and those passed over are reported; a
save that fails leaves what was there before. Only tensors go through torch.distributed.checkpoint, all else is JSON.
Its ``.metadata`` is a pickle, so it is opened only after its digest matches and by an unpickler that admits DCP's own
classes alone. Does not promise anything about a folder that somebody else can write to: a manifest can be forged.
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
from smalti.track.checkpoint_names import complete, is_name, step_of

T = TypeVar("T")

FORMAT = 1
Reject = Callable[[str, str], None]
"""Called with (checkpoint, reason) for each checkpoint that is passed over."""


def folder_name(step: int) -> str:
    """The name of the checkpoint after ``step`` updates."""
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
    own: list[dict[str, Any]] = []
    if failure is None:
        failure = _worst(_attempt(lambda: own.extend(_own_entries(temporary))))
    if failure is None:
        entries = _gather(own)
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
    folder.parent.mkdir(exist_ok=True)  # the run folder itself is there, unless somebody has moved it
    folder.mkdir()


def _write_shards(temporary: Path, tensors: dict[str, Tensor]) -> None:
    writer = dcp.FileSystemWriter(temporary / "shards", thread_count=1)
    dcp.save(dict(tensors), storage_writer=writer)


def _own_entries(temporary: Path) -> list[dict[str, Any]]:
    """Manifest entries of the files that this rank wrote; rank 0 adds DCP's metadata."""
    own = sorted((temporary / "shards").glob(f"__{_rank()}_*"))
    if _first():
        own.append(temporary / "shards" / ".metadata")
    return [_entry(temporary, path) for path in own]


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
    """Delete all but the newest ``keep`` up to ``step``. One that is newer than what was just saved is not ours."""
    for old in [name for name in complete(folder) if step_of(name) <= step][keep:]:
        if (folder / old).is_symlink():  # what it points to may be another run's
            (folder / old).unlink()
            continue
        (folder / old / "COMPLETE").unlink()
        shutil.rmtree(folder / old)


# ---- finding --------------------------------------------------------------------------------------------------------


def newest(folder: str | Path, reject: Reject | None = None, *, shared: bool = False) -> str | None:
    """The newest checkpoint below ``folder`` whose every file matches its digest, or None where there is none at all.

    Its cost is reading the checkpoint once; older ones are looked at only where newer fail. shared: all ranks of the
    world call it and read a part each; all find and reject the same. Otherwise one process reads it all. DataError
    where there are some and none can be used: to start from the beginning then is the user's decision.
    """
    reasons: list[str] = []
    for name in broadcast_from_rank0(lambda: complete(folder)) if shared else complete(folder):
        path = str(Path(folder) / name)
        reason = fault(path, shared=shared)
        if reason is None:
            return path
        reasons.append(f"{name}: {reason}")
        if reject is not None:
            reject(path, reason)
    if reasons:
        raise DataError(
            f"no checkpoint in {folder} can be used: {'; '.join(reasons)}",
            allowed="at least one whose files match its manifest",
            hint="bring one back from a copy, or start anew with name=NEW_NAME; nothing was changed",
        )
    return None


def set_aside_newer(path: str | Path) -> list[str]:
    """Rename the checkpoints beside ``path`` that are newer (damaged, or they would have been chosen); returns them.

    Training goes on from ``path`` and will write those steps again; what is set aside (``rejected-step-...``) stays to
    be looked at.
    """
    folder, moved = Path(path).parent, []
    for name in complete(folder):
        if step_of(name) > step_of(path):
            aside = folder / f"rejected-{name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder / name, aside)
            moved.append(str(aside))
    return moved


def fault(path: str | Path, *, shared: bool = False) -> str | None:
    """Why the checkpoint at ``path`` is damaged, or None where every file matches its digest.

    shared: all ranks of the world call it, each reads a part of the files, and all get the first reason of any.
    DataError for a format of another version; RetryableError where a file is there and cannot be read (permission,
    I/O).
    """
    root = Path(path)
    if not shared:
        entries, reason = _listed(root)
        return reason or _first_mismatch(root, entries) or _misnamed(root)
    entries, reason = broadcast_from_rank0(lambda: _listed(root))
    if reason is not None:
        return reason
    own = _part(entries, dist.get_rank(), dist.get_world_size())
    return _worst(together(lambda: _first_mismatch(root, own))) or broadcast_from_rank0(lambda: _misnamed(root))


def _part(entries: list[dict[str, Any]], rank: int, ranks: int) -> list[dict[str, Any]]:
    """The files that ``rank`` verifies: shards are dealt out by size; what all ranks need is read by rank 0 alone."""
    by_size = sorted(entries, key=lambda entry: -int(entry["bytes"]))
    shards = [entry for entry in by_size if Path(entry["name"]).name.startswith("__")]
    rest = [entry for entry in by_size if entry not in shards]
    return shards[rank::ranks] + (rest if rank == 0 else [])


def _listed(root: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The files that the manifest names; or why it cannot be believed."""

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

    found, reason = _guarded(root, look)
    return found or ([], reason)


def _first_mismatch(root: Path, entries: list[dict[str, Any]]) -> str | None:
    def look() -> str | None:
        return next(filter(None, (_mismatch(root, entry) for entry in entries)), None)

    found, reason = _guarded(root, look)
    return found or reason


def _misnamed(root: Path) -> str | None:
    """Why a sound checkpoint cannot be the one that its folder is named for."""
    if not is_name(root.name):
        return None
    step = read_state(root).get("step", step_of(root))
    return None if step == step_of(root) else f"it is the checkpoint of step {step}, in a folder of another step's name"


def _guarded(root: Path, look: Callable[[], T]) -> tuple[T | None, str | None]:
    """What ``look`` gives, or why the files that it looked at are damaged."""
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
    """The JSON state that was saved with the tensors."""
    state: dict[str, Any] = store.read_json(Path(path) / "train_state.json")
    return state


def load(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place from all ranks; their layout may differ from the one that was saved.

    Rank 0 alone reads what says where the tensors lie; each rank reads its own parts of them.
    """
    reader = ShardReader(Path(path) / "shards")
    reader.share()
    saved = reader.read_metadata().state_dict_metadata
    _check_names(path, saved, tensors)
    dcp.load(dict(tensors), storage_reader=reader)


def shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of each of the model's weights, by the names of its ``state_dict``; digests are not checked."""
    return {name: tuple(entry.size) for name, entry in _stored_model(ShardReader(Path(path) / "shards")).items()}


def _stored_model(reader: ShardReader) -> dict[str, TensorStorageMetadata]:
    return {
        name.removeprefix("model."): entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


class StoredModel(Mapping[str, Tensor]):
    """The model's weights in a checkpoint, by the names of its ``state_dict``: full, plain CPU tensors.

    Each is read when it is asked for, by one process alone. DataError for a checkpoint that is damaged; every file is
    read once to see that.
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
        with warnings.catch_warnings():  # one process reading alone is what is meant here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({f"model.{name}": tensor}, storage_reader=self._reader, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def read_model(path: str | Path) -> dict[str, Tensor]:
    """All weights of ``StoredModel`` at once."""
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


def _gather(own: list[Any]) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return [item for part in parts for item in part]


def _worst(failure: str | None) -> str | None:
    """The first failure of any rank, known to all."""
    found = [text for text in _gather([failure]) if text is not None]
    return found[0] if found else None
