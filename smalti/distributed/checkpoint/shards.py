"""The files of a sharded checkpoint: the plan of what each rank writes, and the index of what is where.

Each rank writes one file in safetensors' format, ``shards/00003.safetensors``: the parts of tensors that it holds, each
under its tensor's name and, for a part, the range of every dim. Of ranks that hold the same part one writes it, so the
bytes do not grow with replicas. ``shards/index.json`` maps every tensor to its parts; no file is a pickle.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from smalti.distributed.group.world import rank

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names that safetensors gives them."""
INDEX = "index.json"
NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A part of a tensor in the file of a rank."""

    tensor: str
    dtype: str
    """A value of ``DTYPES``."""
    offsets: tuple[int, ...]
    """Where the part begins in the tensor, by dim."""
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """First byte in the file's data."""
    n_bytes: int

    @property
    def key(self) -> str:
        """Return its name in the file: the tensor's, with the range of each dim unless it is all of it."""
        if self.sizes == self.shape:
            return self.tensor
        ranges = ",".join(f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.tensor}[{ranges}]"


@dataclass(frozen=True)
class Shard:
    """What one rank writes: its parts in the order of the file, which has no gaps between them."""

    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """Return the size of the data, without the header."""
        return sum(part.n_bytes for part in self.parts)

    def header(self) -> bytes:
        """Return the header of the safetensors file; its data begin at a multiple of 8 bytes."""
        entries = {
            part.key: {
                "dtype": part.dtype,
                "shape": part.sizes,
                "data_offsets": [part.begin, part.begin + part.n_bytes],
            }
            for part in self.parts
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def file_name(of_rank: int) -> str:
    """Return the name of the file that a rank writes below ``shards/``."""
    return f"{of_rank:05d}.safetensors"


def agree(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> tuple[Shard, list[Shard]]:
    """Return what this rank writes, and on rank 0 what each rank writes. A collective of a group of all ranks.

    tensors: name -> this rank's part (DTensor) or a tensor that all ranks hold. Parts of several ranks are distributed
    over these by size. group: None for a world of one.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank() == 0)
    plan = planner.create_local_plan()
    if group is None:
        return (shards := _shards(planner, [plan]))[0], shards
    plans: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(plan, plans if rank() == 0 else None, group=group)
    shards = _shards(planner, plans) if rank() == 0 else []
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(shards) if rank() == 0 else None, group=group)
    return received[0], shards


def _shards(planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[Shard]:
    return [_shard(plan) for plan in planner.create_global_plan(plans)[0]]


def _shard(plan: SavePlan) -> Shard:
    parts: list[Part] = []
    begin = 0
    # the widest elements first, so each part begins at a multiple of its element's size
    for item in sorted(plan.items, key=lambda item: -item.tensor_data.properties.dtype.itemsize):  # type: ignore[union-attr]
        data = item.tensor_data
        assert data is not None
        dtype, chunk = data.properties.dtype, data.chunk
        n_bytes = dtype.itemsize * chunk.sizes.numel()
        name, shape = item.index.fqn, tuple(data.size)
        parts.append(Part(name, DTYPES[dtype], tuple(chunk.offsets), tuple(chunk.sizes), shape, begin, n_bytes))
        begin += n_bytes
    return Shard(tuple(parts))


def index_text(shards: Sequence[Shard]) -> str:
    """Return the content of ``index.json``: the names of the files, and for each tensor its dtype, shape and parts.

    A part is [file, first byte in the file, offsets, sizes].
    """
    tensors: dict[str, Any] = {}
    for number, shard in enumerate(shards):
        data = len(shard.header())
        for part in shard.parts:
            tensor = tensors.setdefault(part.tensor, {"dtype": part.dtype, "shape": part.shape, "parts": []})
            tensor["parts"].append([number, data + part.begin, part.offsets, part.sizes])
    files = [file_name(number) for number in range(len(shards))]
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")) + "\n"
