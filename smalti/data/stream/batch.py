"""One microbatch of one rank: rows of tokens as they were read, and what a model needs of them, made when asked for.

Tokens stay in the width they have on disk, so that a trainer moves 2 bytes a token to its device and widens them there.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.pack.concat import IGNORE, number
from smalti.data.pack.rows import Joints
from smalti.data.sources.source import Int64s


@dataclass(frozen=True, eq=False)
class Batch:
    """S sequences of L tokens."""

    tokens: npt.NDArray[Any]
    """[S, L+1] u16 or u32: column t is input t, and target t - 1. Where a best-fit row joins two pieces, and where a
    document was taken down, see ``inputs`` and ``targets``."""
    source: npt.NDArray[np.int16]
    """[S] index into ``Stream.sources``; -1 for a row that fills up, as the one of an empty batch."""
    first_position: int
    """Position of the first sequence in the order of training; the others follow without a gap."""
    eod_id: int | None
    mask_documents: bool
    joints: Joints | None = None
    """Where pieces and padding begin in best-fit rows; None: a document begins at each end-of-document token."""
    masked: npt.NDArray[np.bool_] | None = None
    """[S, L] targets that do not count; None: all count."""

    @property
    def seq_len(self) -> int:
        """L."""
        return int(self.tokens.shape[1]) - 1

    def filled(self, rows: int, token: int) -> "Batch":
        """At least so many sequences: the same, and behind them some of ``token`` alone, whose targets do not count."""
        more = rows - len(self.tokens)
        if more <= 0:
            return self
        masked = np.ones((rows, self.seq_len), dtype=bool)
        masked[:-more] = ~self.loss_mask
        return replace(
            self,
            tokens=np.pad(self.tokens, ((0, more), (0, 0)), constant_values=token),
            source=np.pad(self.source, (0, more), constant_values=-1),
            masked=masked,
        )

    @cached_property
    def inputs(self) -> Int64s:
        """[S, L]"""
        inputs = self.tokens[:, :-1].astype(np.int64)
        if self.joints is not None:
            inputs[self.joints.row, self.joints.column] = self.joints.token
        return inputs

    @cached_property
    def targets(self) -> Int64s:
        """[S, L]; IGNORE (-100) does not count."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.masked is not None:
            targets[self.masked] = IGNORE
        return targets

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[S, L] True where the target counts."""
        return np.ones(self.tokens[:, 1:].shape, dtype=bool) if self.masked is None else ~self.masked

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """[S, L] within the document."""
        return self._numbered[0]

    @property
    def documents(self) -> npt.NDArray[np.int32]:
        """[S, L] which document of the row: counts up where one begins, from 0 (1 where a row opens with one)."""
        return self._numbered[1]

    @property
    def runs(self) -> int:
        """Runs of one document over all rows: each row begins one, and each document inside a row."""
        return len(self._begins) + int(self._begins[:, 1:].sum())

    @cached_property
    def _numbered(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        return number(self._begins)

    @cached_property
    def _begins(self) -> npt.NDArray[np.bool_]:
        """[S, L] where documents begin."""
        inputs = self.tokens[:, :-1]
        if not self.mask_documents or (self.joints is None and self.eod_id is None):
            return np.zeros(inputs.shape, dtype=bool)
        if self.joints is None:
            return np.asarray(inputs == self.eod_id)
        begins = np.zeros(inputs.shape, dtype=bool)
        begins[self.joints.row, self.joints.column] = True
        return begins
