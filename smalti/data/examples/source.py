"""A folder of examples as a ``Source``: its documents are the sequences of the examples."""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.data.examples.folder import ExamplesRecord, open_array

Int64s = npt.NDArray[np.int64]


class ExampleSource:
    """A ``Source`` whose documents are the sequences of the examples."""

    checked = "whole files (SHA-256)"

    def __init__(self, folder: str, record: ExamplesRecord) -> None:
        self.where = folder
        self.record = record
        self.n_tokens = record.n_tokens
        self.dtype: np.dtype[Any] = np.dtype("<u2" if record.vocab_size <= 1 << 16 else "<u4")
        self.digest = record.digest
        self.tokenizer_digest: str | None = record.tokenizer_digest
        self.vocab_size: int | None = record.vocab_size
        self.eod_id: int | None = record.eod_id
        self.n_documents: int | None = record.n_sequences
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an array of the folder, memory-mapped on first use."""
        if name not in self._arrays:
            self._arrays[name] = open_array(self.where, name)
        return self._arrays[name]

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length]: row i with tokens [begins[i], begins[i] + length)."""
        tokens = self.array("tokens")
        for row, begin in zip(out, begins.tolist(), strict=True):
            row[:] = tokens[begin : begin + out.shape[1]]

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Return the number of the sequence of each token [n]."""
        return np.searchsorted(self.array("ends"), tokens, side="right")

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a sequence."""
        ends = self.array("ends")
        return int(ends[document - 1]) if document else 0, int(ends[document])

    def close(self) -> None:
        """Release the maps, which are opened again by the next read."""
        self._arrays.clear()
