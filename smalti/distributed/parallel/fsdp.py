"""Fully sharded data parallelism (FSDP2) of a plain module, from outside, for any number of ranks, one included.

All world sizes take the same path, so casts and gradient sums are the same. Gradients are summed, never averaged; the
step alone divides, by the global weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.dtensors import local
from smalti.model.dtypes import DTYPES

_KEEP_GATHERED_BYTES = 1 << 30
"""Up to this many bytes of gathered weights blocks stay gathered between forward and backward: one all-gather less."""


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the units that are sharded one by one: the elements of every ModuleList directly below ``model``."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child


def shard(model: nn.Module, mesh: Mesh, *, compute: str, reduce: str) -> nn.Module:
    """Shard ``model`` over ``mesh`` in place, each block and then the root with all other parameters; return ``model``.

    Experts that ``distributed/parallel/expert.py`` has spread over an axis are a separate unit, over the ranks that
    hold the same ones. compute, reduce: ``fp32`` or ``bf16``; the sharded weights keep their own dtype (the
    master). A module with a true attribute ``full_precision`` computes in fp32 whatever ``compute`` is.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce])
    in_full = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The inputs of experts are activations in the block's dtype, and router weights, which stay in fp32.
    of_experts = replace(policy, cast_forward_inputs=False)
    sizes = {p: DTYPES[compute].itemsize if p.is_floating_point() else p.itemsize for p in model.parameters()}
    gathered_bytes = sum(p.numel() * size for p, size in sizes.items())
    # A pipeline stage uses its weights in every microbatch, so resharding would all-gather them each time.
    reshard = gathered_bytes > _KEEP_GATHERED_BYTES and mesh.layout.pipeline == 1
    weights = mesh.weights
    placement = partial(_placement, shards=weights.size(-1))

    for module in model.modules():
        if getattr(module, "full_precision", False):  # a router: small, so it stays gathered
            fully_shard(module, mesh=weights, mp_policy=in_full, reshard_after_forward=False)
    # Dim 0 of these experts [E, F, D] is already sharded over the axis ``expert``, so FSDP shards another.
    for experts in _spread_experts(model) if mesh.layout.expert > 1 else ():
        fully_shard(experts, mesh=mesh.experts, mp_policy=of_experts, reshard_after_forward=reshard,
                    shard_placement_fn=partial(_inner_dim, shards=mesh.experts.size(-1)))  # fmt: skip
    for block in blocks_of(model):
        fully_shard(block, mesh=weights, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement)
    fully_shard(model, mesh=weights, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        # For one rank these settings would only cost two passes over its gradients.
        if isinstance(module, FSDPModule) and mesh.layout.world_size > 1:
            # Sum, do not average. gloo has no PREMUL_SUM, so force a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _spread_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose direct parameters are experts [E, F, D] and already DTensors."""
    return [
        module
        for module in model.modules()
        if any(p.ndim == 3 and isinstance(p, DTensor) for p in module.parameters(recurse=False))
    ]


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Return the dim to shard; None means dim 0.

    Experts [E, F, D] use the first dim divisible by ``shards``: FSDP2 would pad dim 0, so 16 experts on 64 ranks would
    be communicated as 64.
    """
    shape = local(parameter).shape  # this tensor rank's part
    if parameter.ndim != 3 or shape[0] % shards == 0:
        return None
    return next((Shard(dim) for dim in (1, 2) if shape[dim] % shards == 0), None)


def _inner_dim(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dim of experts to shard when dim 0 is sharded already: their width F, or one of an adapter's."""
    shape = local(parameter).shape
    return next(Shard(dim) for dim in (1, 2) if shape[dim] % shards == 0)  # why_not_expert and why_not_adapter


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the storage of a module on the meta device. Parameters are uninitialised, buffers 0."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()


def materialize(model: nn.Module, device: torch.device, value: Callable[[str, torch.Size], Tensor]) -> None:
    """Allocate the storage of a sharded module on the meta device, and set each parameter.

    ``value(name, global shape)`` returns the full tensor; each rank keeps its own part, so the result does not depend
    on the number of ranks. One full parameter exists at a time.
    """
    allocate(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assign(parameter, value(name, parameter.shape))


def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy the full tensor into a parameter that may be a shard of it."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(
            full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(full)


def broadcast(model: nn.Module) -> None:
    """Broadcast rank 0's weights and buffers, for a module that the caller has built, before it is sharded."""
    if dist.get_world_size() > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
