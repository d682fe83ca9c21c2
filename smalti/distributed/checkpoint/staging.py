"""Copies of the tensors of a checkpoint in host memory, made while training continues.

The memory belongs to the copy and is used again for the next checkpoint: as many bytes as this rank writes, pinned on a
GPU. It has the layout of the file, so what is hashed is what is written.
"""

import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from smalti.distributed.checkpoint.shards import NAMES, Part, Shard

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: numpy has no bfloat16."""


class HostCopy:
    """A copy of what this rank writes, in host memory of its own."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.header = shard.header()
        """The header of the file."""
        self._shard = shard
        self._memory = torch.empty(shard.n_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def n_bytes(self) -> int:
        """Return the size of its memory."""
        return self._memory.nbytes

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; no tensor may change until ``wait`` has returned."""
        sources = [_local(tensors, part) for part in self._shard.parts]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for part, source in zip(self._shard.parts, sources, strict=True):
                    self._view(part).copy_(source, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()
            return
        self._thread = threading.Thread(target=self._copy, args=(sources,), name="checkpoint-copy", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when tensors may change: on a GPU later work of its stream waits, and not this thread."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        self._join()

    def data(self) -> memoryview:
        """Return the data of the file, once everything is copied."""
        if self._copied is not None:
            self._copied.synchronize()
        self._join()
        return self._memory.numpy().data

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _copy(self, sources: list[Tensor]) -> None:
        try:
            for part, source in zip(self._shard.parts, sources, strict=True):
                integers = _AS_INTEGERS[source.element_size()]
                # numpy copies without the lock of the interpreter and without torch's threads, which are busy
                np.copyto(self._view(part).view(integers).numpy(), source.view(integers).numpy())
        except Exception as error:
            self._failure = error

    def _view(self, part: Part) -> Tensor:
        memory = self._memory[part.begin : part.begin + part.n_bytes]
        return memory.view(NAMES[part.dtype]).view(part.sizes)


def _local(tensors: Mapping[str, Tensor], part: Part) -> Tensor:
    """Return the memory of this rank that holds a part."""
    tensor = find_state_dict_object(tensors, MetadataIndex(part.tensor, part.offsets))  # type: ignore[arg-type]
    return tensor.detach()  # type: ignore[no-any-return]
