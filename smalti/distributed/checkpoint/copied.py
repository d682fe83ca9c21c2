"""The weights of a checkpoint in an object store, read part by part: nothing is written to a disk.

    CopiedModel.open("s3://bucket/runs/demo", step=1000)["layers.0.mlp.down.weight"]

Each part is compared with its digest when it is read, and the index with that in ``COMPLETE``.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.objects import Requests
from smalti.distributed.checkpoint.shard_file import Place
from smalti.distributed.checkpoint.shard_reader import parse_index
from smalti.distributed.checkpoint.shards import INDEX
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copy_retention import read_best
from smalti.track.checkpoints.names import folder_name, step_of

_CACHED_PARTS = 32
"""Parts in memory, 32 MiB each: those of a tensor begin and end within parts that its neighbours need too."""


def name_of_copy(copies: Copies, step: int | None) -> str:
    """Return the name of the copy of ``step``, else of the best, else of the newest. Raises UserError without one."""
    names = copies.complete()
    best = read_best(copies) if step is None else None
    if step is not None:
        name: str | None = folder_name(step)
    else:
        name = best.name if best is not None and best.name in names else next(iter(names), None)
    if name is None or name not in names:
        raise UserError(
            f"{copies.url} has no complete checkpoint{'' if step is None else f' of step {step}'}",
            allowed=", ".join(str(step_of(each)) for each in reversed(names)) or None,
            hint=f"smalti runs checkpoints {copies.url}",
        )
    return name


class CopiedModel(Mapping[str, Tensor]):
    """The model's weights in a copy, by the names of its ``state_dict``, as ``StoredModel``: each is read on access.

    ema: of each weight that has one, its moving average. Raises DataError for a damaged copy, UserError where ``ema``
    is asked for and no weight has one, and what the store raises.
    """

    def __init__(self, copies: Copies, name: str, *, ema: bool = False) -> None:
        self.place = store.join(copies.url, name)
        self.step = step_of(name)
        self._copies, self._name = copies, name
        index = copies.index(name)
        self.config = index.config
        """``config.yaml`` of its run."""
        self._files = {file.name: file for file in index.files}
        self._sizes, self._part_bytes = index.sizes(), index.part_bytes
        self._parts: OrderedDict[str, bytes] = OrderedDict()
        if f"shards/{INDEX}" not in self._files:
            raise DataError(
                f"{self.place} is of an earlier format, whose shards cannot be read in a store",
                hint=f"smalti runs checkpoints copy {copies.url} {self.step} RUN/checkpoints",
            )
        metadata = parse_index(self._whole(f"shards/{INDEX}"), f"{self.place}/shards/{INDEX}")
        self._saved, self._places = metadata.state_dict_metadata, metadata.storage_data
        self._keys = {
            key.removeprefix("model."): key for key in self._saved if key.startswith("model.")
        }  # as the names of the state_dict
        if ema:
            averages = {name: f"optimizer.{name}.ema" for name in self._keys}
            stored = {name: key for name, key in averages.items() if key in self._saved}
            if not stored:
                raise UserError(
                    f"checkpoint {self.place} has no moving average of weights", hint="train with train.ema"
                )
            self._keys |= stored

    @classmethod
    def open(cls, url: str, step: int | None, *, ema: bool = False) -> Self:
        """Open the copy of ``step``, the best or the newest, below the URL of a run. Raises UserError without one."""
        copies = Copies(url, Requests())
        return cls(copies, name_of_copy(copies, step), ema=ema)

    def state(self) -> dict[str, Any]:
        """Return the JSON state that was saved with the tensors."""
        state: dict[str, Any] = json.loads(self._whole("train_state.json"))
        return state

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        saved = self._saved[key]
        assert isinstance(saved, TensorStorageMetadata)
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        for number, chunk in enumerate(saved.chunks):
            place: Place = self._places[MetadataIndex(key, chunk.offsets, number)]
            if not place.n_bytes:
                continue
            data = self._range(f"shards/{place.file}", place.begin, place.n_bytes)
            source = torch.from_numpy(np.frombuffer(data, np.uint8)).view(place.dtype).view(place.sizes)
            target = tensor
            for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, begin, length)
            target.copy_(source)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _whole(self, file: str) -> bytes:
        return bytes(self._range(file, 0, self._files[file].bytes))

    def _range(self, file: str, begin: int, n_bytes: int) -> bytearray:
        """Return bytes of a file of the checkpoint."""
        data = bytearray()
        first = begin // self._part_bytes
        while len(data) < n_bytes:
            number = first + (begin % self._part_bytes + len(data)) // self._part_bytes
            start = begin + len(data) - number * self._part_bytes
            part = self._part(file, number)
            data += part[start : start + n_bytes - len(data)]
        return data

    def _part(self, file: str, number: int) -> bytes:
        names = self._files[file].part_names()
        if number >= len(names):
            raise DataError(f"{self.place}/{file} is shorter than its index says")
        part = names[number]
        if part not in self._parts:
            digest = self._files[file].parts[number]
            self._parts[part] = self._copies.part(self._name, part, self._sizes[part], digest)
            if len(self._parts) > _CACHED_PARTS:
                self._parts.popitem(last=False)
        self._parts.move_to_end(part)
        return self._parts[part]
