"""Makes parameters DTensors; the local part of a tensor that may be one, and the norm of such tensors."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(module: nn.Module, name: str, dim: int, axis: DeviceMesh) -> None:
    """Replace a parameter of ``module`` by a DTensor that is sharded along ``dim`` over ``axis``."""
    whole = getattr(module, name)
    part = distribute_tensor(whole.detach(), axis, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def square_norm(gradients: list[Tensor], *, pipeline: int = 1) -> Tensor:
    """Return this rank's share of the squared L2 norm over all gradients: shape (), fp64.

    The shares of all ranks sum to the squared norm. A part that several ranks hold is divided by their number, so the
    tensors may have different meshes. ``pipeline``: ranks along that axis, which have different tensors.
    """
    world_size = dist.get_world_size() // pipeline if dist.is_initialized() else 1
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for copies, group in _by_copies(gradients, world_size).items():
        norms = torch._foreach_norm([local(gradient) for gradient in group])
        total = total + torch.stack(norms).double().square().sum() / copies
    return total


def _by_copies(gradients: list[Tensor], world_size: int) -> dict[int, list[Tensor]]:
    """Group gradients by the number of ranks that hold the same part."""
    groups: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        copies = world_size
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            copies //= math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
        groups.setdefault(copies, []).append(gradient)
    return groups
