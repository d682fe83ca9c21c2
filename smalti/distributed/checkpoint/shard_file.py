"""Reads a shard once, in the order of its bytes: parts go to the tensors that need them, everything to a digest.

The digest takes each chunk while the cache of the core still holds it, so that a verified load reads no byte twice.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from torch import Tensor

from smalti.base.hashing import xxh3_stream

CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor is: a file, its first byte there, its shape and dtype."""

    file: str
    begin: int
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Return the size of the part."""
        return self.dtype.itemsize * math.prod(self.sizes)


@dataclass(frozen=True)
class Block:
    """A block of a part, and the tensor of its shape that it is copied into."""

    offsets: tuple[int, ...]
    """Where the block begins in the part, by dim."""
    target: Tensor


class ShardFile:
    """A shard that is read. digests: whether ``finish`` returns the XXH3-128 of the whole file, which is then read."""

    def __init__(self, path: Path, *, digests: bool) -> None:
        self._path = path
        self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
        self._digest = xxh3_stream() if digests else None
        self._position = 0
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def fill(self, place: Place, blocks: Sequence[Block]) -> None:
        """Copy blocks of a part, which begins after all parts that were read before.

        Raises EOFError where the file ends before the part does.
        """
        if not place.n_bytes or not blocks:
            return
        sizes = place.sizes or (1,)
        blocks = [Block(block.offsets or (0,), block.target.view(block.target.shape or (1,))) for block in blocks]
        row_bytes = place.n_bytes // sizes[0]
        first = min(block.offsets[0] for block in blocks)
        end = max(block.offsets[0] + block.target.shape[0] for block in blocks)
        if len(blocks) == 1 and _is_memory_of(blocks[0].target, sizes, place.dtype):
            self._skip_to(place.begin + first * row_bytes)
            self._read(blocks[0].target.view(-1).view(torch.uint8))
            return
        n_rows = max(1, CHUNK_BYTES // row_bytes)
        for row in range(first, end, n_rows):
            rows = (min(n_rows, end - row), *sizes[1:])
            data = self._of_scratch(rows[0] * row_bytes)
            self._skip_to(place.begin + row * row_bytes)
            self._read(data)
            for block in blocks:
                _copy_rows(data.view(place.dtype).view(rows), row, block)

    def finish(self) -> str:
        """Read the rest and return the digest of the file."""
        assert self._digest is not None
        self._skip_to(max(self._position, os.fstat(self._file.fileno()).st_size))
        return self._digest.hexdigest()

    def _skip_to(self, position: int) -> None:
        assert position >= self._position, "parts are read in the order of the file"
        if self._digest is None:
            self._file.seek(position)
            self._position = position
        while self._position < position:
            self._read(self._scratch[: min(len(self._scratch), position - self._position)])

    def _read(self, target: Tensor) -> None:
        """Read as many bytes as ``target`` (uint8, host memory) has, into it."""
        memory = target.numpy().data
        for begin in range(0, len(memory), CHUNK_BYTES):
            chunk = memory[begin : begin + CHUNK_BYTES]
            done = 0
            while done < len(chunk):
                n_read: int = self._file.readinto(chunk[done:])  # type: ignore[attr-defined]
                if not n_read:
                    raise EOFError(f"shards/{self._path.name} ends after {self._position + done} bytes")
                done += n_read
            self._position += done
            if self._digest is not None:
                self._digest.update(chunk)

    def _of_scratch(self, n_bytes: int) -> Tensor:
        if n_bytes > len(self._scratch):  # a single row is longer than a chunk
            self._scratch = torch.empty(n_bytes, dtype=torch.uint8)
        return self._scratch[:n_bytes]


def _is_memory_of(target: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether the bytes of whole rows of a part can be read into the memory of ``target``."""
    whole_rows = tuple(target.shape[1:]) == sizes[1:]
    return whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()


def _copy_rows(source: Tensor, row: int, block: Block) -> None:
    """Copy what a block needs of some rows of its part, which begin at ``row``."""
    begin = max(row, block.offsets[0])
    end = min(row + source.shape[0], block.offsets[0] + block.target.shape[0])
    if begin >= end:
        return
    source = source[begin - row : end - row]
    for dim in range(1, source.dim()):
        source = source.narrow(dim, block.offsets[dim], block.target.shape[dim])
    block.target[begin - block.offsets[0] : end - block.offsets[0]].copy_(source)
