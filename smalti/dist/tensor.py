"""Tensor parallelism: each matrix shared by the ranks of the axis ``tensor``, laid on a plain model."""

from torch import nn

from smalti.dist.mesh import Mesh


def lay(model: nn.Module, mesh: Mesh) -> None:
    """Make weights DTensors of the axis and put the collectives around them. Before ``fsdp.shard``."""
    if mesh.layout.tensor > 1:
        raise NotImplementedError
