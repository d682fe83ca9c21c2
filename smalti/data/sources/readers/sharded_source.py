"""A source whose tokens are in shards: rows are split at shard boundaries, and a *layout* locates tokens in a shard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.shards import StoredShards
from smalti.data.sources.readers.token_ids import Ids
from smalti.data.sources.source import Int64s

_VERIFY_TOKENS = 1 << 20


@dataclass(frozen=True)
class Piece:
    """The part of a row in one shard."""

    shard: int
    begin: int
    """Index of the first token in the shard."""
    out: npt.NDArray[Any]

    @property
    def end(self) -> int:
        """Index after the last token in the shard."""
        return self.begin + self.out.size


class Layout(Protocol):
    """Locates the tokens of a shard."""

    dtype: "np.dtype[Any]"
    """Integer dtype of the files."""

    def prepare(self, shards: Sequence[int]) -> None:
        """Read, in one batch, the metadata that ``span`` and ``values`` need for these shards."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Return the bytes [start, stop) of the decompressed shard that contain the tokens of ``piece``."""

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """Extract the tokens of ``piece`` from the bytes of its span."""


class FlatLayout:
    """Layout of contiguous tokens that begin at byte ``starts[shard]``."""

    def __init__(self, dtype: "np.dtype[Any]", starts: Sequence[int]) -> None:
        self.dtype = dtype
        self._starts = starts

    def prepare(self, shards: Sequence[int]) -> None:
        """Do nothing: no metadata is needed."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Return the bytes of the tokens."""
        width = self.dtype.itemsize
        start = self._starts[piece.shard]
        return start + piece.begin * width, start + piece.end * width

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """View the bytes as tokens."""
        return np.frombuffer(data, self.dtype, count=piece.out.size)


@dataclass(frozen=True)
class Facts:
    """Attributes of a source that its format determines; see ``data/sources/source.py``."""

    digest: str
    checked: str
    vocab_size: int | None
    eod_id: int | None


class ShardedSource:
    """A ``Source`` (``data/sources/source.py``) over the shards of a folder."""

    tokenizer_digest: str | None = None

    def __init__(
        self,
        stored: StoredShards,
        layout: Layout,
        shard_tokens: Int64s,
        facts: Facts,
        documents: Documents | None = None,
    ) -> None:
        self.where = stored.files.where
        self.digest = facts.digest
        self.checked = facts.checked
        self.vocab_size = facts.vocab_size
        self.eod_id = facts.eod_id
        self.n_documents = documents.n_documents if documents else None
        self._stored = stored
        self._layout = layout
        self._documents = documents
        self._ids = Ids(layout.dtype, facts.vocab_size)
        self.dtype: np.dtype[Any] = self._ids.dtype
        self._starts: Int64s = np.concatenate([[0], np.cumsum(shard_tokens)]).astype(np.int64)
        self.n_tokens = int(self._starts[-1])
        if self.n_tokens < 1:
            raise DataError(f"{self.where} holds no tokens")

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``: row i with tokens [begins[i], begins[i] + length)."""
        assert out.dtype == self.dtype, (out.dtype, self.dtype)
        pieces = list(self._pieces(np.asarray(begins, dtype=np.int64), out))
        if not self._stored.any_compressed:
            self._fill(pieces)
            return
        pieces.sort(key=lambda piece: piece.shard)  # so that each shard is decompressed once
        for _, group in groupby(pieces, key=lambda piece: piece.shard):
            self._fill(list(group))

    def read(self, begin_token: int, n: int) -> npt.NDArray[np.int64]:
        """Return tokens [begin_token, begin_token + n) as int64 [n]."""
        out = np.empty((1, n), dtype=self.dtype)
        self.read_rows(np.array([begin_token]), out)
        tokens: npt.NDArray[np.int64] = out[0].astype(np.int64)
        return tokens

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Return the number of the document of each token [n]."""
        if tokens.size:
            self._require(int(tokens.min()), int(tokens.max()) + 1)
        return self._known().at(np.asarray(tokens, dtype=np.int64))

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a document."""
        return self._known().span(document)

    def verify(self) -> None:
        """Read everything: sizes, the hashes of the index, and every token. Raises DataError at the first fault."""
        for shard, (first, last) in enumerate(zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)):
            self._stored.verify(shard)
            for begin in range(first, last, _VERIFY_TOKENS):
                n = min(last - begin, _VERIFY_TOKENS)
                self.read_rows(np.array([begin]), np.empty((1, n), dtype=self.dtype))
            if self._documents:
                self._documents.ends(shard)

    def close(self) -> None:
        """Close files and connections, which are opened again by the next read."""
        self._stored.close()

    def _pieces(self, begins: Int64s, out: npt.NDArray[Any]) -> Iterator[Piece]:
        length = out.shape[1]
        if not out.size:
            return
        self._require(int(begins.min()), int(begins.max()) + length)
        shards = np.searchsorted(self._starts, begins, side="right") - 1
        inside = begins - self._starts[shards]
        room = self._starts[shards + 1] - begins
        for row, shard, begin, left in zip(out, shards.tolist(), inside.tolist(), room.tolist(), strict=True):
            done = 0
            while left < length:
                if left > done:
                    yield Piece(shard, begin, row[done:left])
                done = left
                begin = 0
                shard += 1
                left += int(self._starts[shard + 1] - self._starts[shard])
            yield Piece(shard, begin, row[done:])

    def _fill(self, pieces: Sequence[Piece]) -> None:
        layout = self._layout
        layout.prepare([piece.shard for piece in pieces])
        buffers = self._stored.read([(piece.shard, *layout.span(piece)) for piece in pieces])
        for piece, data in zip(pieces, buffers, strict=True):
            self._ids.put(layout.values(piece, data), piece.out, self._stored.path(piece.shard))

    def _require(self, begin: int, end: int) -> None:
        if begin < 0 or end > self.n_tokens:
            raise DataError(f"tokens {begin:,} to {end:,} are outside {self.where}", allowed=f"0 to {self.n_tokens:,}")

    def _known(self) -> Documents:
        if self._documents is None:
            raise UserError(
                f"{self.where} does not record where its documents begin and end",
                hint="docs/guides/other-formats.md lists the formats that do",
            )
        return self._documents
