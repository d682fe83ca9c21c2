"""Pipeline parallelism: the layers of a model spread over the ranks of the axis ``pipeline``."""

from torch import nn

from smalti.dist.mesh import Mesh


def own_stages(model: nn.Module, mesh: Mesh) -> None:
    """Take away the layers of a model on the meta device that are not this rank's. Before everything else."""
    if mesh.layout.pipeline > 1:
        raise NotImplementedError
