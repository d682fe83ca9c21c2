"""Expert parallelism: the experts of each layer spread over the ranks of the axis ``expert``.

A rank holds E / ranks experts of every layer, as DTensors of the axis, which ``fsdp.shard`` shards further along their
width. Names and global shapes of parameters stay the same.

Shapes: E experts, F width inside an expert, D hidden.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from smalti.config.model import ModelConfig
from smalti.config.parallel import DispatchMode
from smalti.cost.layout.rules import divisors, require, why_not_expert
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.adapters import ExactLoRADispatch, StaticLoRADispatch
from smalti.distributed.parallel.dispatch import Dispatch, ExactDispatch, StaticDispatch
from smalti.model.adapters.lora import LoRAExperts
from smalti.model.blocks.moe.experts import Experts

_MODES: dict[DispatchMode, tuple[type[Dispatch], type[Dispatch]]] = {
    "exact": (ExactDispatch, ExactLoRADispatch),
    "static": (StaticDispatch, StaticLoRADispatch),
}
"""The replacement of experts, without adapters and with them."""


def apply(model: nn.Module, mesh: Mesh, *, dispatch: DispatchMode) -> None:
    """Make the experts' weights DTensors of the axis, and replace ``Experts`` by modules that send tokens to them.

    ``model`` is on the meta device. After ``tensor.apply``, whose sharding of the width it keeps, and before
    ``fsdp.shard``. UserError with the nearest size where experts or their width do not divide, or there are none.
    """
    layout = mesh.layout
    if layout.expert == 1:
        return
    config = cast(ModelConfig, model.config)
    sizes = divisors(config.moe.num_experts) if config.moe else [1]
    require(
        layout,
        "expert",
        lambda size: why_not_expert(config, size, layout.weight_shards, layout.tensor),
        [size for size in sizes if not (layout.sequence % size and size % layout.sequence)],
    )
    experts_of = {(parent, name): experts for parent in model.modules()
                  for name, experts in parent.named_children() if isinstance(experts, Experts)}  # fmt: skip
    group, modes = mesh.group("expert"), _MODES[dispatch]
    for (parent, name), experts in experts_of.items():
        for weight_name, weight_EFD in list(experts.named_parameters(recurse=False)):
            setattr(experts, weight_name, _spread(weight_EFD, mesh))
        setattr(parent, name, modes[isinstance(experts, LoRAExperts)](experts, group))


def assume_even_load(model: nn.Module) -> None:
    """Make ``ExactDispatch`` assume the same number of rows for every rank.

    For a traced step, which has no choices to read; not for training.
    """
    for module in model.modules():
        if isinstance(module, ExactDispatch):
            module.assumes_even_load = True


def _spread(weight_EFD: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """Return a DTensor with dim 0 sharded over the ranks of ``expert``; the placement over ``tensor`` is unchanged."""
    over: DeviceMesh = mesh.axis("expert")
    places: list[Placement] = [Shard(0)]
    if isinstance(weight_EFD, DTensor):
        over = mesh.root[mesh.dim("expert"), mesh.dim("tensor")]
        places = [Shard(0), *weight_EFD.placements]
    whole_EFD = torch.empty(weight_EFD.shape, dtype=weight_EFD.dtype, device="meta")
    return nn.Parameter(distribute_tensor(whole_EFD, over, places, src_data_rank=None), weight_EFD.requires_grad)
