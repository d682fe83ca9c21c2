"""Reader of the shards of a checkpoint: DCP's reader, with an unpickler that admits DCP's own classes alone.

``.metadata`` is a pickle: it can create no object of another class and name no file outside its folder. It is opened
only after its digest matches (``checkpoint.fault``).
"""

import io
import os
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from smalti.base import store
from smalti.base.errors import DataError
from smalti.distributed.group.world import broadcast_from_rank0


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
    """DCP's reader with the guarded unpickler, confined to its folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._admitted_metadata
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def share(self) -> None:
        """Have rank 0 read the metadata for all ranks, which call this together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._admitted_metadata = broadcast_from_rank0(lambda: self._admitted_metadata)

    @cached_property
    def _admitted_metadata(self) -> Metadata:
        data = store.read_bytes(Path(self.path) / ".metadata")
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
        except Exception as error:
            raise DataError(f"{self.path}/.metadata cannot be read: {error}") from error
        for info in metadata.storage_data.values():
            if os.path.basename(info.relative_path) != info.relative_path:
                raise DataError(f"{self.path}/.metadata points outside its folder: {info.relative_path}")
        return metadata  # type: ignore[no-any-return]
