"""The device mesh of an attempt: every rank of the world along the axes of a ``cost.axes.Layout``.

    pipeline  x  replicate  x  [ shard x sequence  =  expert_shard x expert ]  x  tensor

Ranks are numbered from the innermost axis, as by ``cost.layout.collectives.group``. Weights are sharded over shard x
sequence, which this module calls ``shard``; experts over its inner part, ``expert``, and the rest, ``expert_shard``.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Axis


@dataclass(frozen=True)
class Mesh:
    """The mesh of a layout; built by ``build``. It has one root, so that DTensors of different axes compose."""

    layout: Layout
    root: DeviceMesh
    """All ranks, along the finest dims, from which shard, sequence, expert and expert_shard are joined."""

    @cached_property
    def weights(self) -> DeviceMesh:
        """Mesh that FSDP2 shards dense weights over: ``shard``, or ``replicate`` x ``shard`` (HSDP)."""
        return self._with_replicate("shard")

    @cached_property
    def experts(self) -> DeviceMesh:
        """Mesh that FSDP2 shards the experts of a rank over: ``expert_shard``, or ``replicate`` x ``expert_shard``."""
        return self._with_replicate("expert_shard")

    def axis(self, name: Axis) -> DeviceMesh:
        """Return the ranks along an axis that include this one, as a mesh of one dim."""
        dim = self.dim(name)
        return self._joined[dim] if dim in self._joined else self.root[dim]

    def group(self, name: Axis) -> dist.ProcessGroup:
        """Return the ranks along an axis that include this one, as a process group."""
        return dist.group.WORLD if name == "world" else self.axis(name).get_group()  # type: ignore[return-value]

    def local_rank(self, name: Axis) -> int:
        """Return the number of this rank along an axis, from 0."""
        return dist.get_rank() if name == "world" else self.axis(name).get_local_rank()

    @property
    def data_rank(self) -> int:
        """Number of this rank among the ``layout.data_ranks`` that read different rows.

        Sequence, tensor and pipeline ranks read the same rows.
        """
        ranks_of_row = self.layout.tensor * self.layout.sequence
        return dist.get_rank() // ranks_of_row % self.layout.data_ranks

    def dim(self, name: Axis) -> str:
        """Return the dim of ``root`` for an axis, which is joined from finer dims where necessary."""
        parts = _finest(self.layout)[1].get(name, (name,))
        if len(parts) == 1:
            return parts[0]
        assert parts, f"no axis {name} in {self.layout}"
        if name not in self._joined:
            self._joined[name] = self.root[parts]._flatten(name)
        return name

    @cached_property
    def _joined(self) -> dict[str, DeviceMesh]:
        return {}

    def _with_replicate(self, name: Axis) -> DeviceMesh:
        if self.layout.replicate == 1:
            return self.axis(name)
        with warnings.catch_warnings():  # torch 2.11 has no other function that pairs a joined dim
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.root["replicate", self.dim(name)]


def build(device: torch.device, layout: Layout | None = None) -> Mesh:
    """Build the mesh of ``layout`` over the world; without one, all ranks form the axis ``shard``. A collective.

    The process group must exist (``distributed/group/world.py``).
    """
    layout = layout or Layout(shard=dist.get_world_size())
    assert layout.world_size == dist.get_world_size(), f"{layout} does not have {dist.get_world_size()} ranks"
    inner, _ = _finest(layout)
    sizes = {"pipeline": layout.pipeline, "replicate": layout.replicate, **inner, "tensor": layout.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name in inner}
    mesh = Mesh(layout, init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    for name, parts in _finest(layout)[1].items():
        if parts:  # joining makes a group, which is a collective of all ranks
            mesh.dim(name)  # type: ignore[arg-type]
    return mesh


def _finest(layout: Layout) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the finest dims of shard x sequence = expert_shard x expert, from the outermost, with their sizes; and the
    dims that each axis is joined from. ``Layout`` guarantees that of sequence and expert one divides the other.
    """
    shard, sequence, expert = layout.shard, layout.sequence, layout.expert
    if expert >= sequence:
        sizes = {"rows": shard * sequence // expert, "between": expert // sequence, "inner": sequence}
        axes = {"sequence": ("inner",), "expert": ("between", "inner"), "expert_shard": ("rows",)}
    else:
        sizes = {"rows": shard, "between": sequence // expert, "inner": expert}
        axes = {"sequence": ("between", "inner"), "expert": ("inner",), "expert_shard": ("rows", "between")}
    axes["shard"] = ("rows", "between", "inner")
    wide = {name: size for name, size in sizes.items() if size > 1 or name == "rows"}
    axes = {name: tuple(part for part in parts if part in wide) for name, parts in axes.items()}
    # Name a mesh dim after the axis it equals; if several axes equal it, the first of this list.
    names = {parts[0]: name for name in ("expert_shard", "expert", "sequence", "shard")
             if len(parts := axes[name]) == 1}  # fmt: skip
    renamed = {name: tuple(names.get(part, part) for part in parts) for name, parts in axes.items()}
    return {names.get(name, name): size for name, size in wide.items()}, renamed
