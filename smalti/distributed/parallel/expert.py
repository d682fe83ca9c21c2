"""Expert parallelism: the experts of a layer spread over the ranks of the axis ``expert``, laid on a plain model.

Promises: a rank holds E / ranks experts of every layer, as DTensors of the axis, which ``fsdp.shard`` cuts further
along their width; names and global shapes stay, so initial values, checkpoints and exports do not see the axis. Sizes
that do not divide are refused with the nearest that do. Lays nothing on a dense model: it refuses.

Shapes: E experts, F width inside an expert, D hidden.
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from smalti.base.errors import UserError
from smalti.cost.axes import Layout
from smalti.cost.layout.rules import against_spread, divisors
from smalti.distributed.parallel.dispatch import Dispatch, Exact, Static
from smalti.distributed.parallel.mesh import Mesh
from smalti.model.blocks.moe.experts import Experts

Mode = Literal["exact", "static"]


def apply(model: nn.Module, mesh: Mesh, *, dispatch: Mode) -> None:
    """Make the experts' weights DTensors of the axis and swap the dispatch in. After ``tensor.apply``, whose cut of the
    width it keeps; before ``fsdp.shard``. ``model`` is on the meta device."""
    if mesh.layout.expert == 1:
        return
    group = mesh.group("expert")
    for experts in _experts_of(model, mesh.layout):
        for name, weight_EFD in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, _spread(weight_EFD, mesh))
        mode: Dispatch = {"exact": Exact, "static": Static}[dispatch](experts, group)
        experts.begin, experts.forward = mode.begin, mode.forward  # type: ignore[method-assign]


def evenly(model: nn.Module) -> None:
    """Let exact dispatch take every rank for equally wanted, without a look at the choices, which a traced step does
    not have. A model that trains must not be told so."""
    for module in model.modules():
        way = getattr(module.forward, "__self__", None) if isinstance(module, Experts) else None
        if isinstance(way, Exact):
            way.evenly = True


def _spread(weight_EFD: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """As a DTensor whose first dim lies over the ranks of ``expert``; over those of ``tensor`` as it did before."""
    over: DeviceMesh = mesh.axis("expert")
    places: list[Placement] = [Shard(0)]
    if isinstance(weight_EFD, DTensor):
        over = mesh.root[mesh.dim("expert"), mesh.dim("tensor")]
        places = [Shard(0), *weight_EFD.placements]
    whole_EFD = torch.empty(weight_EFD.shape, dtype=weight_EFD.dtype, device="meta")
    return nn.Parameter(distribute_tensor(whole_EFD, over, places, src_data_rank=None), weight_EFD.requires_grad)


def _experts_of(model: nn.Module, layout: Layout) -> list[Experts]:
    """The experts of each layer, which the layout has been seen to fit."""
    found = [module for module in model.modules() if isinstance(module, Experts)]
    if not found and getattr(getattr(model, "config", None), "moe", None) is None:
        raise UserError(
            f"train.parallel.expert={layout.expert} has no effect on a model without experts",
            allowed="1",
            hint="train.parallel.expert=1",
        )
    for experts in found:
        num_experts, width, _ = experts.up_proj.shape
        _check(num_experts, width, layout)
    return found


def _check(num_experts: int, width: int, layout: Layout) -> None:
    """UserError with the nearest size of the axis, where the plan's rule is against this one."""

    def against(size: int) -> str | None:
        return against_spread(num_experts, width, size, layout.weight_shards, layout.tensor)

    wanted, why = layout.expert, against(layout.expert)
    if why is None:
        return
    sizes = [size for size in divisors(num_experts) if not (layout.sequence % size and size % layout.sequence)]
    fits = [size for size in sizes if against(size) is None]
    near = min(fits, key=lambda size: (max(size, wanted) / min(size, wanted), -size))
    raise UserError(
        f"train.parallel.expert={wanted} cannot be: {why}",
        allowed=f"{', '.join(map(str, fits))} (with {layout.weight_shards} ranks in shard x sequence)",
        hint=f"train.parallel.expert={near}",
    )
