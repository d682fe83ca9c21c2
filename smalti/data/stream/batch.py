"""One microbatch of one rank: rows of tokens as on disk, from which inputs, targets and positions are computed.

Tokens keep their width on disk, so that a trainer copies 2 bytes per token to its device and widens them there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """[S, L+1] u16 or u32: column t is input t, and target t - 1. ``inputs`` and ``targets`` differ from it at the
    joints of best-fit rows and in documents that are taken down."""
    source: npt.NDArray[np.int16]
    """[S] index into ``Stream.sources``; -1 for a row of padding, such as that of an empty batch."""
    first_position: int
    """Position of the first sequence in the order of training; the others follow consecutively."""
    eod_id: int | None
    mask_documents: bool
    joints: Joints | None = None
    """The joints of best-fit rows; None: a document begins at each end-of-document token."""
    masked: npt.NDArray[np.bool_] | None = None
    """[S, L] targets that do not count; None: all count."""
    values: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Name -> a number for each document of each row [S, most documents of a row], of examples."""

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence, L."""
        return int(self.tokens.shape[1]) - 1

    def padded(self, rows: int, token: int) -> "Batch":
        """Return the batch padded to at least ``rows`` sequences, with rows of ``token`` whose targets do not count."""
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
            values={name: np.pad(values, ((0, more), (0, 0))) for name, values in self.values.items()},
        )

    @cached_property
    def inputs(self) -> Int64s:
        """[S, L] inputs."""
        inputs = self.tokens[:, :-1].astype(np.int64)
        if self.joints is not None:
            inputs[self.joints.row, self.joints.column] = self.joints.token
        return inputs

    @cached_property
    def targets(self) -> Int64s:
        """[S, L] targets; those equal to IGNORE (-100) do not count."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.masked is not None:
            targets[self.masked] = IGNORE
        return targets

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[S, L] whether the target counts."""
        return np.ones(self.tokens[:, 1:].shape, dtype=bool) if self.masked is None else ~self.masked

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """[S, L] position in the document."""
        return self._numbered[0]

    @property
    def documents(self) -> npt.NDArray[np.int32]:
        """[S, L] number of the document in the row, from 0 (from 1 if a document begins with the row)."""
        return self._numbered[1]

    @property
    def runs(self) -> int:
        """Number of runs of tokens of one document: each row begins one, and each document inside a row."""
        return len(self._begins) + int(self._begins[:, 1:].sum())

    @cached_property
    def _numbered(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        return number(self._begins)

    @cached_property
    def _begins(self) -> npt.NDArray[np.bool_]:
        """[S, L] whether a document begins."""
        inputs = self.tokens[:, :-1]
        if not self.mask_documents or (self.joints is None and self.eod_id is None):
            return np.zeros(inputs.shape, dtype=bool)
        if self.joints is None:
            return np.asarray(inputs == self.eod_id)
        begins = np.zeros(inputs.shape, dtype=bool)
        begins[self.joints.row, self.joints.column] = True
        return begins
