"""Sharded checkpoints: finds the newest that verifies, and loads it on any number of ranks.

    step-00001000/{shards/, train_state.json, manifest.json, COMPLETE}      latest (a hint: the name of the newest)

Files are checked before they are read, or while they are (``load_verified``). ``saver.py`` writes them.
docs/concepts/train/checkpoints.md.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from smalti.base import log
from smalti.base.errors import DataError, UserError
from smalti.distributed.checkpoint.shard_reader import ShardReader
from smalti.distributed.group.world import broadcast_from_rank0, first_failure, together
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import NoneUsable, complete, step_of

Reject = Callable[[str, str], None]
"""Called with (checkpoint, reason) for each checkpoint that is passed over."""


# ---- finding --------------------------------------------------------------------------------------------------------


def newest(
    folder: str | Path,
    reject: Reject | None = None,
    *,
    shared: bool = False,
    load_verifies: bool = False,
    rejected: dict[str, str] | None = None,
    memory: Path | None = None,
) -> str | None:
    """Return the newest checkpoint below ``folder`` whose every file matches its digest, or None if there is none.

    The checkpoint is read once for that; older ones only where newer ones fail. shared: all ranks of the world call
    this and read a part each, with the same result. Otherwise one process reads everything. load_verifies: the bytes of
    the shards are left to ``load_verified``. reject: is called with each checkpoint that fails and the reason; by
    default a warning is logged. rejected: path -> reason of those that have failed before; they are passed over, and
    those that fail now are added. memory: a folder of copies in shared memory, which are taken first of those of a
    step; ranks on another node have another folder. NoneUsable where there are checkpoints and none can be used: to
    start from the beginning is then the user's decision.
    """
    rejected = {} if rejected is None else rejected
    names = broadcast_from_rank0(lambda: _by_step(folder, memory)) if shared else _by_step(folder, memory)
    paths = [str((memory if memory is not None and in_memory else Path(folder)) / name) for in_memory, name in names]
    for path in [path for path in paths if path not in rejected]:
        reason = fault(path, shared=shared, load_verifies=load_verifies)
        if reason is None:
            return path
        rejected[path] = reason
        (reject or _warn)(path, reason)
    if any(Path(path).parent != memory for path in rejected):
        reasons = "; ".join(f"{Path(path).name}: {reason}" for path, reason in rejected.items())
        raise NoneUsable(
            f"no checkpoint in {folder} can be used: {reasons}",
            allowed="at least one whose files match its manifest",
            hint="restore one from a copy, or start anew with name=NEW_NAME; nothing was changed",
        )
    return None


def _by_step(folder: str | Path, memory: Path | None) -> list[tuple[bool, str]]:
    """Return whether it is a copy in ``memory``, and the name, of the complete checkpoints of both, newest first."""
    copies = [(True, name) for name in ([] if memory is None else complete(memory))]
    return sorted([*copies, *((False, name) for name in complete(folder))], key=lambda each: -step_of(each[1]))


def _warn(path: str, reason: str) -> None:
    log.get("checkpoint").warning("%s is skipped: %s", path, reason)


def fault(path: str | Path, *, shared: bool = False, load_verifies: bool = False) -> str | None:
    """Return why the checkpoint at ``path`` is damaged, or None where every file matches its digest.

    shared: all ranks of the world call this, each reads a part of the files, and all get the first reason of any rank.
    load_verifies, with ``shared``: of the shards only the sizes are compared. DataError for a format of another
    version; RetryableError where a file exists and cannot be read (permission, I/O).
    """
    if not shared:
        assert not load_verifies
        return manifest.fault(path)
    root = Path(path)
    entries, reason = broadcast_from_rank0(lambda: manifest.listed(root))
    if reason is not None:
        return reason
    later = _shards(entries) if load_verifies else []
    part = _part([entry for entry in entries if entry not in later], dist.get_rank(), dist.get_world_size())
    mismatch = first_failure(together(lambda: manifest.first_mismatch(root, part)))
    return mismatch or broadcast_from_rank0(lambda: manifest.wrong_size(root, later) or manifest.misplaced(root))


def _shards(entries: list[manifest.Entry]) -> list[manifest.Entry]:
    """Return the files that ``load_verified`` verifies, by name; none of a checkpoint of format 1."""
    return sorted(
        (entry for entry in entries if Path(entry["name"]).suffix == ".safetensors"), key=lambda entry: entry["name"]
    )


def _part(entries: list[manifest.Entry], rank: int, ranks: int) -> list[manifest.Entry]:
    """Return the files that ``rank`` verifies: shards are distributed by size, and rank 0 reads all other files."""
    by_size = sorted(entries, key=lambda entry: -int(entry["bytes"]))
    shards = [entry for entry in by_size if Path(entry["name"]).suffix in (".safetensors", ".distcp")]
    rest = [entry for entry in by_size if entry not in shards]
    return shards[rank::ranks] + (rest if rank == 0 else [])


# ---- loading --------------------------------------------------------------------------------------------------------


def load(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place, called by all ranks; their layout may differ from the one that was saved.

    Rank 0 alone reads the metadata. Each part of a DTensor is read by one rank, which sends it to the ranks that hold
    the same part (the other replicas). Digests are not compared.
    """
    reason = _load(path, tensors, {})
    if reason is not None:
        raise DataError(f"checkpoint {path} cannot be used: {reason}", hint="name another step, or train again")


def load_verified(path: str | Path, tensors: dict[str, Tensor]) -> str | None:
    """Fill ``tensors`` as ``load`` does, and return why the checkpoint is damaged, or None: the same on every rank.

    For a checkpoint of ``newest(..., load_verifies=True)``: each shard is compared with its digest by one rank, while
    it is read. Where it is damaged, the tensors have any values and must be loaded from another checkpoint.
    """
    ranks = dist.get_world_size()
    entries, reason = broadcast_from_rank0(lambda: manifest.listed(Path(path)))
    if reason is not None:
        return str(reason)
    shards = _shards(entries)
    # on as many ranks as have saved, each verifies the file that it reads; on others, one of which it reads a part
    part = [entry for number, entry in enumerate(shards) if number * ranks // len(shards) == dist.get_rank()]
    return _load(path, tensors, {Path(entry["name"]).name: entry["xxh3"] for entry in part})


def _load(path: str | Path, tensors: dict[str, Tensor], digests: dict[str, str]) -> str | None:
    """Fill ``tensors``; return why a file is damaged. digests: of the files that this rank verifies."""
    reader = ShardReader(Path(path) / "shards", digests)
    reader.share()
    saved = reader.read_metadata().state_dict_metadata
    _check_names(path, saved, tensors)
    dcp.load({name: tensor for name, tensor in tensors.items() if _is_first(tensor)}, storage_reader=reader)
    reason = reader.fault()
    if reason is None:
        for name in sorted(tensors):  # the same order on the ranks of each group
            _send_to_replicas(tensors[name])
    return reason


def _is_first(tensor: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same part; each rank reads plain tensors."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate()
    return place is None or all(place[dim] == 0 for dim in _replicated(tensor))


def _send_to_replicas(tensor: Tensor) -> None:
    if not isinstance(tensor, DTensor) or not (dims := _replicated(tensor)):
        return
    local = tensor.to_local().detach()
    whole = local.contiguous()
    for dim in dims:
        dist.broadcast(whole, group=tensor.device_mesh.get_group(dim), group_src=0)
    if whole is not local:
        local.copy_(whole)


def _replicated(tensor: DTensor) -> list[int]:
    """Return the dims of the mesh along which ranks hold the same part."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return [dim for dim, (placement, size) in enumerate(sizes) if placement.is_replicate() and size > 1]


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
    ema: of each weight that has one, its moving average (``train.ema``). UserError where none has. verified: the caller
    has compared the digests, so the files are not read for them again.
    """

    def __init__(self, path: str | Path, *, ema: bool = False, verified: bool = False) -> None:
        problem = None if verified else fault(path)
        if problem is not None:
            raise DataError(f"checkpoint {path} cannot be used: {problem}", hint="name another step, or train again")
        self._reader = ShardReader(Path(path) / "shards")
        self._saved = _stored_model(self._reader)
        averages = {name: f"optimizer.{name}.ema" for name in self._saved} if ema else {}
        stored = self._reader.read_metadata().state_dict_metadata
        self._averages = {name: average for name, average in averages.items() if average in stored}
        if ema and not self._averages:
            raise UserError(f"checkpoint {path} has no moving average of weights", hint="train with train.ema")

    def __getitem__(self, name: str) -> Tensor:
        saved = self._saved[name]
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        with warnings.catch_warnings():  # one process reads alone on purpose
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            key = self._averages.get(name, f"model.{name}")
            dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
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
