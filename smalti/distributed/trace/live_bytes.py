"""Counts the bytes of live tensor storages during a step, each once, however many views it has.

Every storage that an operator returns to Python or to autograd is counted until it is freed, in the backward pass and
in recomputed blocks too. Not counted: memory that a kernel allocates and frees inside one operator, and memory that an
allocator caches or loses to fragmentation.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Storage:
    """One storage; ``phase``, ``op``, ``shape`` and ``dtype`` are those of its first tensor."""

    bytes: int
    """Current size; 0 once it is freed."""
    phase: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    """Label set with ``LiveBytes.name``."""
    is_resized: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.kind or self.phase} {self.op} {self.dtype.removeprefix('torch.')}[{shape}]"


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes() as live: ...``; afterwards ``live.peak()``. Slow; changes no result.

    Tensors that exist before are those known to the garbage collector. With ``fake`` only those that are named, and
    fake tensors (``FakeTensorMode``) are counted too, with the bytes that real ones would have.
    """

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.in_phase = "before"
        """Phase of the events from here on."""
        self._now: weakref.WeakKeyDictionary[torch.UntypedStorage, Storage] = weakref.WeakKeyDictionary()
        self._log: list[tuple[str, Storage, int]] = []

    def __enter__(self) -> "LiveBytes":
        gc.collect()
        held = () if self._fake else gc.get_objects()
        for tensor in (candidate for candidate in held if issubclass(type(candidate), torch.Tensor)):
            self._add(tensor, "held")
        # Resizing is no operator, so a dispatch mode does not see it. torch's own MemTracker
        # (torch/distributed/_tools/mem_tracker.py) replaces the method in the same manner; comparing the sizes of all
        # storages at each operator instead would miss the order of what is freed and allocated between two operators.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators are called on plain tensors, which this mode receives
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, str(func.overloadpacket))
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: set the phase of the events inside."""
        before, self.in_phase = self.in_phase, name
        try:
            yield
        finally:
            self.in_phase = before

    def name(self, tensor: torch.Tensor, kind: str, *, again: bool = True) -> None:
        """Label the storage of ``tensor``; with ``again`` false, only if it has no label yet."""
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._add(inner, "held")
        entry = self._now.get(inner.untyped_storage())
        if entry is not None and (again or not entry.kind):
            entry.kind = kind

    def rename_phase(self, old: str, new: str) -> None:
        """Move the storages of a phase that are still alive to another phase."""
        for entry in self._now.values():
            if entry.phase == old:
                entry.phase = new

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of each phase."""
        peaks: dict[str, int] = {}
        for phase, total, _ in self._moments():
            peaks[phase] = max(peaks.get(phase, 0), total)
        return peaks

    def peak(self, phase: str | None = None) -> tuple[str, int, dict[Storage, int]]:
        """Return (phase, bytes, live storages with their bytes) at the peak, of ``phase`` alone if given."""
        peak_bytes, peak_phase, peak_index = -1, "", 0
        for index, (in_phase, total, _) in enumerate(self._moments()):
            if total > peak_bytes and phase in (None, in_phase):
                peak_bytes, peak_phase, peak_index = total, in_phase, index
        alive: Counter[Storage] = Counter()
        for _, storage, change in self._log[: peak_index + 1]:
            alive[storage] += change
        return peak_phase, peak_bytes, {storage: size for storage, size in alive.items() if size > 0}

    @property
    def moment(self) -> int:
        """Length of the log that ``events`` returns."""
        return len(self._log)

    def events(self) -> list[tuple[str, Storage, int]]:
        """Return (phase, storage, change in bytes) in order."""
        return list(self._log)

    def _moments(self) -> Iterator[tuple[str, int, Storage]]:
        total = 0
        for phase, storage, change in self._log:
            total += change
            yield phase, total, storage

    def _add(self, tensor: torch.Tensor, op: str) -> None:
        if isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        if storage in self._now:
            return
        # A fake tensor reports its device, its storage reports meta.
        if storage.device.type == "meta" and not (self._fake and isinstance(tensor, FakeTensor)):
            return
        entry = Storage(storage.nbytes(), self.in_phase, op, tuple(tensor.shape), str(tensor.dtype))
        self._now[storage] = entry
        self._log.append((self.in_phase, entry, entry.bytes))
        weakref.finalize(storage, partial(self._remove, entry)).atexit = False

    def _remove(self, entry: Storage) -> None:
        self._log.append((self.in_phase, entry, -entry.bytes))
        entry.bytes = 0

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(storage, size)
        if storage in self._now:
            entry = self._now[storage]
            self._log.append((self.in_phase, entry, size - entry.bytes))
            entry.bytes, entry.is_resized = size, True
        return result
