"""Counts the bytes of tensor storages that are alive while torch works: each once, however many views it has.

Guarantees: every storage that an operator hands to Python or to autograd is counted from the operator on until nothing
holds it, with what resizing a storage changes (FSDP2 frees gathered weights so); custom autograd functions, recomputed
blocks and the backward pass included. Not seen: what a kernel takes and gives back inside one operator, and memory that
an allocator keeps or loses between blocks. Works by a dispatch mode, so it is slow and changes no result. Fake tensors
(``FakeTensorMode``) are counted on request, with the bytes that real ones would have.
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
    """Now; 0 once it is gone."""
    phase: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    """What it is to the one who counts; set with ``LiveBytes.name``."""
    is_resized: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.kind or self.phase} {self.op} {self.dtype.removeprefix('torch.')}[{shape}]"


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes() as live: ...``; afterwards ``live.peak()``. Tensors that exist before are found by the
    garbage collector; with ``fake`` only those are known that are named, and fake tensors are counted too."""

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.in_phase = "before"
        """What happens now is of this phase."""
        self._now: weakref.WeakKeyDictionary[torch.UntypedStorage, Storage] = weakref.WeakKeyDictionary()
        self._log: list[tuple[str, Storage, int]] = []

    def __enter__(self) -> "LiveBytes":
        gc.collect()
        held = () if self._fake else gc.get_objects()
        for tensor in (found for found in held if issubclass(type(found), torch.Tensor)):
            self._see(tensor, "held")
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls its operators on plain tensors, which come by here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(func.overloadpacket))
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is of this phase."""
        before, self.in_phase = self.in_phase, name
        try:
            yield
        finally:
            self.in_phase = before

    def name(self, tensor: torch.Tensor, kind: str, *, again: bool = True) -> None:
        """Say what a storage is; with ``again`` false, only where nobody has said it yet."""
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._see(inner, "held")
        entry = self._now.get(inner.untyped_storage())
        if entry is not None and (again or not entry.kind):
            entry.kind = kind

    def rename_phase(self, old: str, new: str) -> None:
        """What is still alive of a phase is of another one."""
        for entry in self._now.values():
            if entry.phase == old:
                entry.phase = new

    def peaks(self) -> dict[str, int]:
        """The most bytes in each phase."""
        found: dict[str, int] = {}
        for phase, total, _ in self._moments():
            found[phase] = max(found.get(phase, 0), total)
        return found

    def peak(self, phase: str | None = None) -> tuple[str, int, dict[Storage, int]]:
        """(phase, bytes, what was alive with its bytes) at the moment of the most; ``phase``: among its moments."""
        best, where, at = -1, "", 0
        for index, (in_phase, total, _) in enumerate(self._moments()):
            if total > best and phase in (None, in_phase):
                best, where, at = total, in_phase, index
        alive: Counter[Storage] = Counter()
        for _, storage, change in self._log[: at + 1]:
            alive[storage] += change
        return where, best, {storage: size for storage, size in alive.items() if size > 0}

    @property
    def moment(self) -> int:
        """Where the log of ``events`` is now."""
        return len(self._log)

    def events(self) -> list[tuple[str, Storage, int]]:
        """(phase, storage, change in bytes), in their order."""
        return list(self._log)

    def _moments(self) -> Iterator[tuple[str, int, Storage]]:
        total = 0
        for phase, storage, change in self._log:
            total += change
            yield phase, total, storage

    def _see(self, tensor: torch.Tensor, op: str) -> None:
        if isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        if storage in self._now:
            return
        # A fake tensor says that it is on a device, its storage does not.
        if storage.device.type == "meta" and not (self._fake and isinstance(tensor, FakeTensor)):
            return
        entry = Storage(storage.nbytes(), self.in_phase, op, tuple(tensor.shape), str(tensor.dtype))
        self._now[storage] = entry
        self._log.append((self.in_phase, entry, entry.bytes))
        weakref.finalize(storage, partial(self._gone, entry)).atexit = False

    def _gone(self, entry: Storage) -> None:
        self._log.append((self.in_phase, entry, -entry.bytes))
        entry.bytes = 0

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(storage, size)
        if storage in self._now:
            entry = self._now[storage]
            self._log.append((self.in_phase, entry, size - entry.bytes))
            entry.bytes, entry.is_resized = size, True
        return result
