"""Safetensors files, read and written a tensor at a time, so that a model need never be whole in memory.

Format (safetensors 0.4): 8 bytes with the length of the header, the header as a JSON object of ``name: {dtype, shape,
data_offsets}``, then the data, without holes.

Guarantees: a header is checked whole before a byte of data is read (sizes, overlaps, duplicate names, unknown formats),
and what is wrong is named with its file and tensor; data is read with plain reads, so a file that is cut while it is
read is an error and not a crash. Local files only.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smalti.base.errors import DataError
from smalti.model.json_file import LARGEST_JSON_BYTES, opened, parsed

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Number formats of weights that we read and write."""

_OTHERS = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OTHERS |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | _OTHERS
_CHUNK_BYTES = 1 << 24
_ALIGNMENT_BYTES = 8
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


class Entry(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str
    """The format's own name: ``F32`` ..."""
    shape: tuple[int, ...]
    start_bytes: int
    """From the begin of the file."""
    size_bytes: int


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header has been checked."""

    path: Path
    entries: dict[str, Entry]

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Read and check the header; DataError names what is wrong."""
        with opened(path) as file:
            size_bytes = os.fstat(file).st_size
            head = os.pread(file, 8, 0)
            header_bytes = int.from_bytes(head, "little")
            if os.pread(file, len(_LFS_POINTER), 0) == _LFS_POINTER:
                raise DataError(
                    f"{path} is a pointer of Git LFS: it says which weights belong there, and they were not downloaded",
                    hint=f"git -C {path.parent} lfs pull",
                )
            if len(head) < 8 or not 2 <= header_bytes <= min(size_bytes - 8, LARGEST_JSON_BYTES):
                raise DataError(f"{path} is not a readable safetensors file: it is cut off, or of another kind")
            header = parsed(path, os.pread(file, header_bytes, 8), ", its header,")
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()}
        end = 8 + header_bytes
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].size_bytes)):
            if entry.start_bytes != end:
                fault = "overlaps the one before" if entry.start_bytes < end else "leaves a hole before it"
                raise DataError(f"{path} is not a readable safetensors file: tensor {name} {fault}")
            end += entry.size_bytes
        if end != size_bytes:
            raise DataError(
                f"{path} is not a readable safetensors file: it has {size_bytes:,} bytes, its header describes {end:,}",
                hint="it was cut off, or written by something else; bring it anew",
            )
        return cls(path, entries)

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        with opened(self.path) as file:
            self._fill(file, name, _bytes_of(tensor), 0)
        return tensor

    def check_finite(self, name: str) -> None:
        """DataError where a tensor has a value that is not finite; 16 MiB of it are in memory at a time."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        chunk = torch.empty(min(_CHUNK_BYTES, entry.size_bytes) // dtype.itemsize, dtype=dtype)
        with opened(self.path) as file:
            for start_bytes in range(0, entry.size_bytes, _CHUNK_BYTES):
                part = chunk[: (entry.size_bytes - start_bytes) // dtype.itemsize]
                self._fill(file, name, _bytes_of(part), start_bytes)
                if not torch.stack(part.aminmax()).isfinite().all():
                    place = int((~part.isfinite()).nonzero()[0])
                    raise DataError(
                        f"{self.path}: tensor {name} holds {float(part[place])} (element "
                        f"{start_bytes // dtype.itemsize + place:,} of {entry.size_bytes // dtype.itemsize:,})",
                        allowed="finite numbers",
                        hint="the weights are broken; bring them anew, or take an earlier checkpoint",
                    )

    def _fill(self, file: int, name: str, target: memoryview, start_bytes: int) -> None:
        done, begin = 0, self.entries[name].start_bytes + start_bytes
        while done < len(target):
            got = os.preadv(file, [target[done : done + (1 << 30)]], begin + done)
            if got == 0:
                raise DataError(f"{self.path} ends inside tensor {name}: it was cut while it was read")
            done += got


def _entry(path: Path, name: str, raw: Any, data_start: int) -> Entry:
    fault = f"{path} is not a readable safetensors file: tensor {name}"
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{fault} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise DataError(f"{fault} has the unknown dtype {dtype!r}", allowed=", ".join(_ITEM_BYTES))
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise DataError(f"{fault} has no readable shape and offsets")
    size_bytes = _ITEM_BYTES[dtype]
    for extent in shape:
        size_bytes *= extent
    if offsets[1] - offsets[0] != size_bytes:
        raise DataError(f"{fault} of {dtype} {shape} needs {size_bytes:,} bytes; its offsets are {offsets}")
    return Entry(dtype, tuple(shape), data_start + offsets[0], size_bytes)


def _whole_numbers(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) < 16 and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


# ---- writing --------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, planned: dict[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a file of the tensors that ``planned`` describes (meta tensors suffice), taken from ``tensors`` in turn.

    Exactly as many are taken as are planned; one at a time is held. The file is on the disk when this returns.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, tensor in sorted(planned.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
        starts[name], end = end, end + tensor.nbytes
        offsets = [starts[name], end]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with open(path, "wb", buffering=0) as file:
        _write(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
        for _ in planned:
            name, tensor = next(tensors)
            assert (tensor.shape, tensor.dtype) == (planned[name].shape, planned[name].dtype), name
            _write(file.fileno(), _bytes_of(tensor.contiguous()), 8 + len(text) + starts[name])
            del tensor  # before the next is made
        os.fsync(file.fileno())


def _write(file: int, data: bytes | memoryview, start_bytes: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + (1 << 30)], start_bytes + done)
