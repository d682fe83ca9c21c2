"""Values of each sequence in packed rows: sums over its targets, its last token.

A microbatch of examples (``data/examples``) numbers the sequences of a row in ``documents``, from 1. Both sequences of
a pair are in one row, next to each other. A sequence exists if it has a target in the loss; padding has none.

Shapes: S rows, T tokens, K sequences of a row (an even bound), P = K / 2 pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.train.batches import IGNORE, Microbatch


class Sequences(NamedTuple):
    """The sequences of a microbatch."""

    index_ST: Tensor
    """Number of each token's sequence; K for padding after the last one."""
    lengths_SK: Tensor
    """Targets in the loss; 0 where there is no sequence."""

    def sums(self, values_ST: Tensor) -> Tensor:
        """Return the sum of the values over the tokens of each sequence [S, K]."""
        return _sums(values_ST, self.index_ST, self.lengths_SK.shape[1])

    def last(self, values_ST: Tensor) -> Tensor:
        """Return the value at the last token of each sequence [S, K]; an arbitrary value where there is no sequence."""
        along_ST = torch.arange(values_ST.shape[1], device=values_ST.device).expand_as(self.index_ST)
        begins_SK = along_ST.new_zeros(len(along_ST), self.lengths_SK.shape[1] + 1)
        column_SK = begins_SK.scatter_reduce(1, self.index_ST, along_ST, "amax")[:, :-1]
        return values_ST.gather(1, column_SK)

    def pairs_exist(self) -> Tensor:
        """Return whether both sequences of each pair exist [S, P]."""
        return (self.lengths_SK[:, 0::2] > 0) & (self.lengths_SK[:, 1::2] > 0)


def sequences_of(microbatch: Microbatch) -> Sequences:
    """Return the sequences of a microbatch of examples.

    Without columns of values, their greatest number in a row is read from the device. Raises UserError where documents
    are not masked, and where ranks share rows, as sums over a sequence need all of its tokens.
    """
    documents_ST, targets_ST = microbatch.documents, microbatch.targets
    if documents_ST is None:
        raise UserError("rows of examples without document masks", allowed="data.mask_documents=true")
    if documents_ST.shape != targets_ST.shape:
        raise UserError(
            "a loss over whole sequences with rows that ranks share",
            allowed="train.parallel.sequence=1",
            hint="use the axes shard and tensor for long sequences",
        )
    columns = next(iter(microbatch.values.values()), None)
    bound = int(documents_ST.max()) if columns is None else columns.shape[1]
    bound += bound % 2
    index_ST = (documents_ST - 1).clamp(0, bound)  # a row of padding alone has document 0
    return Sequences(index_ST, _sums((targets_ST != IGNORE).long(), index_ST, bound))


def _sums(values_ST: Tensor, index_ST: Tensor, bound: int) -> Tensor:
    return values_ST.new_zeros(len(values_ST), bound + 1).scatter_add(1, index_ST, values_ST)[:, :-1]


def column(microbatch: Microbatch, name: str) -> Tensor:
    """Return a column [S, K]. Raises UserError where the examples lack it."""
    if name not in microbatch.values:
        columns = ", ".join(sorted(microbatch.values)) or "none"
        raise UserError(f"the examples have no column '{name}'", allowed=f"their columns: {columns}")
    values_SK = microbatch.values[name]
    return F.pad(values_SK, (0, values_SK.shape[1] % 2))
