"""Sequence parallelism: each row of tokens shared by the ranks of the axis ``sequence``, laid on a plain model.

Shapes: S rows, T tokens of a row, t tokens of it on this rank.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from smalti.dist.mesh import Mesh

Context = Literal["ulysses", "ring"]


def lay(model: nn.Module, mesh: Mesh, *, context: Context) -> None:
    """Make attention see the whole row, and sums over a row be those of the whole row. Before ``fsdp.shard``."""
    if mesh.layout.sequence > 1:
        raise NotImplementedError


def own_part(mesh: Mesh, *, context: Context) -> Callable[[Tensor], Tensor]:
    """[S, T] -> [S, t]: the tokens of each row that are this rank's; the whole row where the axis is 1."""
    if mesh.layout.sequence == 1:
        return lambda rows_ST: rows_ST
    raise NotImplementedError
