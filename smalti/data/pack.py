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
    n_rows, seq_len = inputs.shape
    if not mask_documents:
        along = np.tile(np.arange(seq_len, dtype=np.int32), (n_rows, 1))
        return inputs, targets, along, np.zeros(inputs.shape, dtype=np.int32)
    # documents are few beside tokens, so all but one comparison and two repeats is done by document, not by token
    begins = (inputs == eod_id).ravel()
    counted = begins.copy()
    begins[::seq_len] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=inputs.size)
    numbers = np.cumsum(counted[starts])
    rows = starts // seq_len
    first_of_row = np.searchsorted(starts, np.arange(n_rows) * seq_len)
    before_row = numbers[first_of_row] - counted[starts[first_of_row]]
    documents = np.repeat((numbers - before_row[rows]).astype(np.int32), lengths)
    positions = np.arange(inputs.size, dtype=np.int32) - np.repeat(starts.astype(np.int32), lengths)
    return inputs, targets, positions.reshape(inputs.shape), documents.reshape(inputs.shape)
