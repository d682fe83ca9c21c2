"""Reads and writes safetensors files one tensor at a time, so that a model is never completely in memory.

Format (safetensors 0.4): 8 bytes with the length of the header, the header as a JSON object of ``name: {dtype, shape,
data_offsets}``, then the data, without gaps. Local files only.

Guarantees: a header is checked completely before data is read; errors name file and tensor. Files are not mapped, so
one that is truncated while it is read raises an error.
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
"""Dtypes of weights that can be read and written."""

_OTHER_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OTHER_ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | _OTHER_ITEM_BYTES
_CHUNK_BYTES = 1 << 24
_ALIGNMENT_BYTES = 8
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


class Entry(NamedTuple):
    """Dtype, shape and place of a tensor in its file."""

    dtype: str
    """Name in the format: ``F32`` ..."""
    shape: tuple[int, ...]
    start_bytes: int
    """Offset from the begin of the file."""
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
                    f"{path} is a Git LFS pointer: the weights were not downloaded",
                    hint=f"git -C {path.parent} lfs pull",
                )
            if len(head) < 8 or not 2 <= header_bytes <= min(size_bytes - 8, LARGEST_JSON_BYTES):
                raise DataError(f"{path} is not a readable safetensors file: it is truncated, or of another kind")
            header = parsed(path, os.pread(file, header_bytes, 8), ", its header,")
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()}
        end = 8 + header_bytes
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].size_bytes)):
            if entry.start_bytes != end:
                fault = "overlaps the one before it" if entry.start_bytes < end else "has a gap before it"
                raise DataError(f"{path} is not a readable safetensors file: tensor {name} {fault}")
            end += entry.size_bytes
        if end != size_bytes:
            raise DataError(
                f"{path} is not a readable safetensors file: it has {size_bytes:,} bytes, its header describes {end:,}",
                hint="it is truncated or damaged; download it again",
            )
        return cls(path, entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor, in newly allocated memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        with opened(self.path) as file:
            self._fill(file, name, _bytes_of(tensor), 0)
        return tensor

    def check_finite(self, name: str) -> None:
        """Raise DataError if a tensor has a value that is not finite; reads it in chunks of 16 MiB."""
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
                        hint="the weights are broken; download them again, or use an earlier checkpoint",
                    )

    def _fill(self, file: int, name: str, target: memoryview, start_bytes: int) -> None:
        begin = self.entries[name].start_bytes + start_bytes
        done = 0
        while done < len(target):
            got = os.preadv(file, [target[done : done + (1 << 30)]], begin + done)
            if got == 0:
                raise DataError(f"{self.path} ends inside tensor {name}: it was truncated while it was read")
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
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


# ---- writing --------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, planned: dict[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a file of the tensors that ``planned`` describes (meta tensors suffice), taken from ``tensors`` in order.

    Exactly as many are taken as are planned, and one at a time is in memory. The file is on the disk on return.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    # Tensors of the widest dtype come first, so that all are aligned.
    for name, tensor in sorted(planned.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name] = end
        end += tensor.nbytes
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
