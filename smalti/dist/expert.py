"""Expert parallelism: the experts of a layer spread over the ranks of the axis ``expert``, laid on a plain model."""

from typing import Literal

from torch import nn

from smalti.dist.mesh import Mesh


def lay(model: nn.Module, mesh: Mesh, *, dispatch: Literal["exact", "static"]) -> None:
    """Make the experts' weights DTensors of the axis and swap the dispatch in. Before ``fsdp.shard``."""
    if mesh.layout.expert > 1:
        raise NotImplementedError
