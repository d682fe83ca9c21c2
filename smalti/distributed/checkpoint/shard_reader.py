"""Reads the shards of a checkpoint for DCP's load, which plans what each rank needs: files of ``shards.py``.

Checkpoints of format 1 have DCP's own files. Their ``.metadata`` is a pickle: it is opened only after its digest
matches (``checkpoint.fault``), by an unpickler that admits DCP's own classes alone, and can name no file outside its
folder.
"""

import io
import json
import os
import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from smalti.base import store
from smalti.base.errors import DataError, RetryableError
from smalti.distributed.checkpoint.shard_file import Block, Place, ShardFile
from smalti.distributed.checkpoint.shards import INDEX, NAMES
from smalti.distributed.group.world import broadcast_from_rank0, first_failure, together
from smalti.track.checkpoints.manifest import guarded


class _Unpickler(pickle.Unpickler):
    """Admits the classes of DCP's metadata and nothing else."""

    _ADMITTED = frozenset(
        {
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
            ("pathlib._local", "WindowsPath"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ADMITTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"checkpoint metadata names {module}.{name}, which is not allowed")


class ShardReader(dcp.FileSystemReader):
    """Reads the folder ``shards/`` of a checkpoint, confined to it.

    digests: name -> XXH3-128 of the files that this rank verifies while it reads. Until ``fault`` has returned None,
    the tensors may have any values.
    """

    def __init__(self, path: str | os.PathLike[str], digests: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self._digests = dict(digests or {})
        self._fault: str | None = None
        self._unreadable: RetryableError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def share(self) -> None:
        """Have rank 0 read the metadata for all ranks, which call this together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._metadata = broadcast_from_rank0(lambda: self._metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if any(not isinstance(place, Place) for place in self.storage_data.values()):
            return super().read_data(plan, planner)  # type: ignore[no-any-return]
        try:  # not raised here, as the ranks would not agree on the reason
            fault, reason = guarded(Path(self.path).parent, lambda: self._read_files(plan, planner))
            self._fault = fault or reason
        except RetryableError as error:
            self._unreadable = error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fault(self) -> str | None:
        """Return why a file that any rank has read is damaged, on all ranks; RetryableError where one is unreadable."""

        def of_rank() -> str | None:
            if self._unreadable is not None:
                raise self._unreadable
            return self._fault

        return first_failure(together(of_rank))

    def _read_files(self, plan: LoadPlan, planner: LoadPlanner) -> str | None:
        """Read what the plan asks for, and the files to verify; return why one of these is damaged, or None."""
        files: dict[str, dict[Place, list[Block]]] = {file: {} for file in self._digests}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            block = Block(tuple(item.storage_offsets), planner.resolve_tensor(item).detach())
            files.setdefault(place.file, {}).setdefault(place, []).append(block)
        for name, parts in sorted(files.items()):
            digest = self._digests.get(name)
            with ShardFile(Path(self.path) / name, digests=digest is not None) as file:
                for place in sorted(parts, key=lambda place: place.begin):
                    file.fill(place, parts[place])
                if digest is not None and file.finish() != digest:
                    return f"shards/{name} does not match its digest"
        return None

    @cached_property
    def _metadata(self) -> Metadata:
        if store.exists(Path(self.path) / INDEX):
            path = Path(self.path) / INDEX
            return parse_index(store.read_bytes(path), str(path))
        metadata = _read_pickle(Path(self.path) / ".metadata")
        for info in metadata.storage_data.values():
            _check_inside(self.path, info.relative_path)
        return metadata


def parse_index(data: bytes, path: str) -> Metadata:
    """Return the content of ``index.json`` as DCP's load plan needs it. Raises DataError, which names ``path``."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    try:
        content = json.loads(data)
        for file in content["files"]:
            _check_inside(path.rpartition("/")[0], file)
        for name, tensor in content["tensors"].items():
            dtype = NAMES[tensor["dtype"]]
            chunks = []
            for number, (file, begin, offsets, sizes) in enumerate(tensor["parts"]):
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                key = MetadataIndex(name, torch.Size(offsets), number)
                places[key] = Place(content["files"][file], begin, tuple(sizes), dtype)
            size = torch.Size(tensor["shape"])
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not valid: {type(error).__name__}: {error}") from error
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(checkpoint_id=path.rpartition("/")[0]))


def _read_pickle(path: Path) -> Metadata:
    data = store.read_bytes(path)
    try:
        return _Unpickler(io.BytesIO(data)).load()  # type: ignore[no-any-return]
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _check_inside(folder: str | os.PathLike[str], file: str) -> None:
    if os.path.basename(file) != file:
        raise DataError(f"the index of {folder} points outside its folder: {file}")
