"""A log of the collectives of one rank: operation, axis of the mesh, bytes, and optionally start and end.

Ranks that form several axes at once have one process group; a call is then named after the axis that makes such calls
(``_USUAL``). If the ranks of ``sequence`` and ``expert`` are the same, their all-to-alls count as ``expert``.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smalti.base import clock
from smalti.cost.layout.collectives import Axis
from smalti.distributed.group.mesh import Mesh

OTHER = "other"
"""The axis of a group that is neither the world nor an axis of the mesh."""

_PREFIXES = (
    ("all_gather", ("_allgather_base", "allgather", "all_gather")),
    ("reduce_scatter", ("_reduce_scatter_base", "reduce_scatter")),
    ("all_reduce", ("allreduce", "all_reduce")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("send", ("send", "isend")),
    ("recv", ("recv", "irecv")),
)
"""Op -> prefixes of torch's names for it; other ops keep torch's name, without underscores at its ends."""
_USUAL: dict[str, tuple[Axis, ...]] = {
    "all_gather": ("shard", "expert_shard", "tensor"),
    "reduce_scatter": ("shard", "expert_shard", "tensor"),
    "all_reduce": ("replicate", "tensor", "sequence", "world"),
    "all_to_all": ("expert", "sequence"),
    "send": ("pipeline", "sequence"),
    "recv": ("pipeline", "sequence"),
}
"""Op -> the axes that make such calls, where one group is several of them."""
_OF_THE_WORLD = (torch.float64, torch.int32)
"""Dtypes of the step's own reduction and of the votes of the loop; axes reduce fp32 and bf16."""


@dataclass(eq=False)
class Call:
    """One collective of this rank."""

    op: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``send``, ``recv``, or as torch calls it."""
    axis: str
    """A ``cost.layout.collectives.Axis``, or ``other``."""
    bytes: int
    """Bytes of its larger buffer."""
    times: int = 1
    """Number of calls that it stands for."""
    start_s: float | None = None
    """When the host called it, on the clock of ``base.clock``; None without ``timed``."""
    end_s: float | None = None
    """When it was done; None where the host cannot know."""
    to_higher_rank: bool = True
    """True for a send or receive from a lower rank of the group to a higher one."""


See = Callable[[Call, list[torch.Tensor]], None]
"""Called with (call, its input and output tensors)."""


@dataclass(frozen=True, order=True)
class Total:
    """Calls of one kind."""

    op: str
    """Operation. A send and a receive of equal size are one ``send_recv``; in a pipeline, if in the same direction."""
    axis: str
    count: int
    bytes: int
    """Bytes of one call."""


class Traffic(TorchDispatchMode):
    """``with Traffic(mesh) as traffic: ...``; afterwards ``traffic.calls`` and ``traffic.totals()``.

    Records every collective of torch, on any stream, in the forward pass, the backward pass and the hooks of FSDP2,
    because each goes through the dispatcher. Slows the host down; changes no result. Bytes are those of the larger
    buffer of a call, as in ``cost/layout/collectives.py``.
    """

    def __init__(self, mesh: Mesh | None = None, *, timed: bool = False, see: See | None = None) -> None:
        """Without ``mesh``, only the world has a name. timed: record times, of CPU tensors only, whose collectives end
        where the host can know. see: is called with each call and its tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self.calls: list[Call] = []
        self._axes = _axes_of_groups(mesh)
        self._timed, self._times = timed, 1
        self._pending: weakref.WeakKeyDictionary[torch.UntypedStorage, Call] = weakref.WeakKeyDictionary()

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Context manager: calls inside count ``number`` times."""
        before, self._times = self._times, number
        try:
            yield
        finally:
            self._times = before

    def totals(self) -> list[Total]:
        """Sum up the calls by kind, the largest first."""
        return totals(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators are called on plain tensors, which this mode receives
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        call = self._call_of(str(func.overloadpacket.__name__), args)
        result = func(*args, **(kwargs or {}))
        if call is None:
            self._waited(args)
            return result
        call.bytes = max(call.bytes, _bytes(result))
        self.calls.append(call)
        if self._see is not None:
            self._see(call, [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)])
        if self._timed:
            self._follow(call, result)
        return result

    def _call_of(self, name: str, args: Any) -> Call | None:
        """Return None for an op without a process group, which moves nothing."""
        group = _group_name(args)
        if group is None:
            return None
        op = next((op for op, begins in _PREFIXES if name.startswith(begins)), name.strip("_"))
        buffers = [_bytes(argument) for argument in args]
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        axis = self._axis(op, group, None if first is None else first.dtype)
        start_s = clock.now_s() if self._timed else None
        return Call(
            op, axis, max(buffers, default=0), self._times, start_s, to_higher_rank=_goes_to_higher_rank(op, args)
        )

    def _axis(self, op: str, group: str, dtype: torch.dtype | None) -> str:
        if group not in self._axes:
            self._axes[group] = _of_ranks(group, self._axes)
        named = self._axes[group]
        if "world" in named and (len(named) == 1 or (op == "all_reduce" and dtype in _OF_THE_WORLD)):
            return "world"
        return next((axis for axis in _USUAL.get(op, ()) if axis in named), named[0])

    # ---- when a call is done ----------------------------------------------------------------------------------------

    def _follow(self, call: Call, result: Any) -> None:
        leaves = tree_leaves(result)
        work = next((leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)), None)
        if work is None:  # a functional collective: it ends where the caller waits for its result
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                    self._pending[leaf.untyped_storage()] = call
            return
        try:
            future = dist.Work.unbox(work).get_future()
        except (RuntimeError, NotImplementedError):  # gloo's sends have no future
            return
        future.add_done_callback(partial(_done, call))

    def _waited(self, args: Any) -> None:
        for leaf in tree_leaves(args) if self._timed else ():
            call = self._pending.pop(leaf.untyped_storage(), None) if isinstance(leaf, torch.Tensor) else None
            if call is not None:
                call.end_s = clock.now_s()


def totals(calls: Iterable[Call]) -> list[Total]:
    """Sum up calls by op, axis and bytes, the largest first."""
    counts: Counter[tuple[str, str, int]] = Counter()
    moved: dict[tuple[str, int, bool], Counter[str]] = {}
    for call in calls:
        if call.op in ("send", "recv"):  # a ring has no direction: every pair is one
            kind = call.axis, call.bytes, call.to_higher_rank or call.axis != "pipeline"
            moved.setdefault(kind, Counter())[call.op] += call.times
        else:
            counts[call.op, call.axis, call.bytes] += call.times
    for (axis, size, _), numbers in moved.items():
        counts["send_recv", axis, size] += max(numbers.values())
    rows = [Total(op, axis, count, size) for (op, axis, size), count in counts.items()]
    return sorted(rows, key=lambda row: (-row.count * row.bytes, row))


def _goes_to_higher_rank(op: str, args: Any) -> bool:
    """Return whether a send goes to a higher rank of its group, or a receive comes from a lower one."""
    if op not in ("send", "recv") or not isinstance(args[1], torch.ScriptObject):
        return True
    rank, peer = dist.ProcessGroup.unbox(args[1]).rank(), int(args[2])
    return rank < peer if op == "send" else peer < rank


def _done(call: Call, future: Any) -> None:
    call.end_s = clock.now_s()


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors of one argument."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _group_name(args: Any) -> str | None:
    """Return the name of the process group that a call was given as an object or by name."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return str(dist.ProcessGroup.unbox(value).group_name)
    return next((value for value in reversed(args) if isinstance(value, str)), None)


def _axes_of_groups(mesh: Mesh | None) -> dict[str, list[str]]:
    """Return name of a process group -> the axes that it forms."""
    axes: dict[str, list[str]] = {dist.group.WORLD.group_name: ["world"]} if dist.is_initialized() else {}  # type: ignore[union-attr]
    if mesh is None:
        return axes
    layout = mesh.layout
    sizes = {
        "shard": layout.weight_shards,
        "expert_shard": layout.weight_shards // layout.expert if layout.expert > 1 else 1,
    }
    for axis in get_args(Axis):
        if axis != "world" and sizes.get(axis, getattr(layout, axis, 1)) > 1:
            axes.setdefault(mesh.group(axis).group_name, []).append(axis)
    return axes


def _of_ranks(name: str, known: dict[str, list[str]]) -> list[str]:
    """Return the axes of a group that is not of the mesh, by its ranks."""
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return ["world"]
    for other, axes in known.items():
        resolved = dist.distributed_c10d._resolve_process_group(other)  # type: ignore[arg-type]
        if dist.get_process_group_ranks(resolved) == ranks:
            return axes
    return [OTHER]
