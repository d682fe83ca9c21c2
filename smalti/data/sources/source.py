"""The interface of a source: tokens of one corpus as one long array, read by range, in any format.

``tokens/`` is Smalti's own format; ``readers/`` has those of other systems. A source is opened from the *index* of its
folder (a manifest, an MDS index.json ...), which one rank reads for all.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Source(Protocol):
    """Tokens of one corpus. Threads may share a source."""

    where: str
    """Folder or URL, for messages."""
    n_tokens: int
    """Tokens in all files, end-of-document tokens included."""
    dtype: "np.dtype[Any]"
    """What ``read_rows`` gives: <u2 or <u4."""
    digest: str
    """Names the content as far as the writer's own hashes go (``checked`` says how far)."""
    checked: str
    """What a read verifies, in words for people: "every block (XXH3-64)", "whole shards (SHA-1)", "sizes only"."""
    tokenizer_digest: str | None
    """Hex SHA-256 of the tokenizer; None where the form does not say."""
    vocab_size: int | None
    """None where the form does not say."""
    eod_id: int | None
    """The token that closes a document; None where there is none."""
    n_documents: int | None
    """None where the form does not say."""

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``: row i with tokens [begins[i], begins[i] + length).

        A store over a network fetches the rows together. Raises DataError for a range outside the data or for bytes
        that fail their check everywhere, RetryableError for a store that does not answer.
        """

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Number of the document that each token [n] belongs to (its closing token included)."""

    def document_span(self, document: int) -> tuple[int, int]:
        """Tokens [begin, end) of a document, its closing token included."""

    def close(self) -> None:
        """Close files and connections; they open again when read."""
