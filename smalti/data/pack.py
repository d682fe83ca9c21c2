"""Concatenate-and-chop: how sequences are cut from the tokens of a source, when they are read.

Sequence i of a source is tokens [i * seq_len, i * seq_len + seq_len + 1): seq_len inputs and, one further, seq_len
targets, so the last token of a sequence is the first input of the next and every token but the first is a target once.
Nothing is stored; the same tokens serve any sequence length. The tokens after the last whole sequence are left out.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

IGNORE = -100
"""A target that does not count."""


def n_sequences(n_tokens: int, seq_len: int) -> int:
    """Whole sequences of ``seq_len`` inputs and targets in ``n_tokens`` tokens."""
    return max(0, (n_tokens - 1) // seq_len)


def split(
    rows_ST1: npt.NDArray[Any], eod_id: int, *, mask_documents: bool = True
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Rows [S, L+1] -> inputs [S, L], targets [S, L], positions [S, L], documents [S, L].

    A document begins at each end-of-document token, which closes one document and stands before the next: its position
    is 0, and ``documents`` counts on there (from 0, or 1 when a row opens with one). With ``mask_documents=False`` a
    row is one document: positions run from 0 to L-1.
    """
    inputs = np.ascontiguousarray(rows_ST1[:, :-1], dtype=np.int64)
    targets = np.ascontiguousarray(rows_ST1[:, 1:], dtype=np.int64)
    along = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    if not mask_documents:
        return inputs, targets, along.copy(), np.zeros(inputs.shape, dtype=np.int32)
    begins = inputs == eod_id
    documents = np.cumsum(begins, axis=1, dtype=np.int32)
    begun_at = np.maximum.accumulate(np.where(begins, along, np.int32(0)), axis=1)
    return inputs, targets, along - begun_at, documents
