"""Rows of the embedding and of the output head for entries that the tokenizer of ``init_from`` does not have.

The row of an entry that was merged begins as the mean of the rows of its pieces, so the model reads it much as it read
them. It is computed in fp32 from the whole matrix, so it is the same to the bit on any ranks.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smalti.base import store
from smalti.base.errors import DataError
from smalti.config.run import RunConfig
from smalti.data.tokenizer.extend import pieces_of
from smalti.train.origin import entries_of, model_of, tokenizer_of

NAMES = ("embed.weight", "lm_head.weight")


@dataclass(frozen=True)
class NewRows:
    """The rows that a model has beyond those of the weights, or that have a new entry."""

    n_rows: int
    pieces: dict[int, list[int]]
    """Id of a merged entry -> ids that the tokenizer of the weights has."""

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a weight has after ``fill``."""
        return (max(self.n_rows, shape[0]), *shape[1:]) if name in NAMES else shape

    def fill(self, name: str, tensor_VD: Tensor) -> Tensor:
        """Return a weight with the new rows. Rows without an entry, and of entries without pieces, are the mean of
        all."""
        if name not in NAMES:
            return tensor_VD
        old_VD = tensor_VD.float()
        n_more = max(0, self.n_rows - len(old_VD))
        rows_VD = torch.cat((old_VD, old_VD.mean(dim=0).expand(n_more, -1)))
        for token_id, pieces in self.pieces.items():
            rows_VD[token_id] = old_VD[pieces].mean(dim=0)
        return rows_VD


def new_rows(config: RunConfig) -> NewRows | None:
    """Return the new rows of a run with ``init_from``; None where its tokenizer has no merge and no row more."""
    assert config.init_from is not None
    folder, ours = tokenizer_of(config.init_from), config.data.tokenizer
    theirs = entries_of(folder)
    if ours is None or theirs is None or entries_of(ours) is None:
        return None
    parts = store.read_json(store.join(ours, "tokenizer.json"))
    pieces = pieces_of(parts, 1 + max(theirs[0].values()))
    if not pieces and config.model.vocab_size <= model_of(config.init_from).vocab_size:
        return None
    if not (Path(config.init_from) / "config.json").is_file():
        raise DataError(
            f"the tokenizer of the data has entries that init_from={config.init_from} lacks, which is not exported",
            allowed="a Hugging Face folder, whose embedding can get more rows",
            hint=f"smalti export {config.init_from}, then init_from=RUN/export",
        )
    return NewRows(config.model.vocab_size, pieces)
