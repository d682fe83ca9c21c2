"""The interface of a source: tokens of one corpus as one long array, read by range, in any format.

``tokens/`` is Smalti's own format; ``readers/`` has those of other systems. A source is opened from the *index* of its
folder (a manifest, an MDS index.json ...), which one rank reads for all.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Source(Protocol):
    """The tokens of one corpus. Thread-safe."""

    where: str
    """Folder or URL, for messages."""
    n_tokens: int
    """Tokens in all files, including end-of-document tokens."""
    dtype: "np.dtype[Any]"
    """The dtype that ``read_rows`` fills: <u2 or <u4."""
    digest: str
    """Identifies the content as far as the hashes of its format allow (see ``checked``)."""
    checked: str
    """Description of what a read verifies: "every block (XXH3-64)", "whole shards (SHA-1)", "sizes only"."""
    tokenizer_digest: str | None
    """Hex SHA-256 of the tokenizer; None if the format does not record it."""
    vocab_size: int | None
    """Size of the vocabulary; None if the format does not record it."""
    eod_id: int | None
    """The id of the end-of-document token; None if there is none."""
    n_documents: int | None
    """Number of documents; None if the format does not record them."""

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``: row i with tokens [begins[i], begins[i] + length).

        Rows in a remote store are fetched concurrently. Raises DataError for a range outside the data or for bytes that
        fail their check in every replica, RetryableError for a store that does not respond.
        """

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Return the number of the document of each token [n]; an end-of-document token belongs to the document."""

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a document, including its end-of-document token."""

    def close(self) -> None:
        """Close files and connections, which are opened again by the next read."""
