"""A source over shards of other people's files: rows are cut at shard edges, and a *layout* finds tokens in a shard."""

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
    """The part of a row that lies in one shard."""

    shard: int
    begin: int
    """First token, counted in the shard."""
    out: npt.NDArray[Any]

    @property
    def end(self) -> int:
        """Behind the last token."""
        return self.begin + self.out.size


class Layout(Protocol):
    """Where the tokens of a shard lie."""

    stored: "np.dtype[Any]"
    """Integer dtype of the files."""

    def prepare(self, shards: Sequence[int]) -> None:
        """Read, together, what is needed to answer for these shards."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """Bytes [start, stop) of the plain shard that hold the tokens of ``piece``."""

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """The tokens of ``piece`` out of the bytes of its span."""


class FlatLayout:
    """Tokens one after another from ``starts[shard]`` on."""

    def __init__(self, stored: "np.dtype[Any]", starts: Sequence[int]) -> None:
        self.stored, self._starts = stored, starts

    def prepare(self, shards: Sequence[int]) -> None:
        """Nothing is needed."""

    def span(self, piece: Piece) -> tuple[int, int]:
        """A plain slice."""
        width, start = self.stored.itemsize, self._starts[piece.shard]
        return start + piece.begin * width, start + piece.end * width

    def values(self, piece: Piece, data: memoryview) -> npt.NDArray[Any]:
        """As they lie."""
        return np.frombuffer(data, self.stored, count=piece.out.size)


@dataclass(frozen=True)
class Facts:
    """What a form says of a whole source; see ``data/sources/source.py``."""

    digest: str
    checked: str
    vocab_size: int | None
    eod_id: int | None


class ShardedSource:
    """See ``data/sources/source.py`` for what a source does."""

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
        self.digest, self.checked = facts.digest, facts.checked
        self.vocab_size, self.eod_id = facts.vocab_size, facts.eod_id
        self.n_documents = documents.n_documents if documents else None
        self._stored, self._layout, self._documents = stored, layout, documents
        self._ids = Ids(layout.stored, facts.vocab_size)
        self.dtype: np.dtype[Any] = self._ids.dtype
        self._starts: Int64s = np.concatenate([[0], np.cumsum(shard_tokens)]).astype(np.int64)
        self.n_tokens = int(self._starts[-1])
        if self.n_tokens < 1:
            raise DataError(f"{self.where} holds no tokens")

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``: row i with tokens [begins[i], begins[i] + length)."""
        assert out.dtype == self.dtype, (out.dtype, self.dtype)
        pieces = list(self._pieces(np.asarray(begins, dtype=np.int64), out))
        if not self._stored.any_packed:
            self._fill(pieces)
            return
        pieces.sort(key=lambda piece: piece.shard)  # each is unpacked once, and what was unpacked can go
        for _, group in groupby(pieces, key=lambda piece: piece.shard):
            self._fill(list(group))

    def read(self, begin_token: int, n: int) -> npt.NDArray[np.int64]:
        """Tokens [begin_token, begin_token + n) as int64 [n]."""
        out = np.empty((1, n), dtype=self.dtype)
        self.read_rows(np.array([begin_token]), out)
        tokens: npt.NDArray[np.int64] = out[0].astype(np.int64)
        return tokens

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Number of the document that each token [n] belongs to."""
        if tokens.size:
            self._require(int(tokens.min()), int(tokens.max()) + 1)
        return self._known().at(np.asarray(tokens, dtype=np.int64))

    def document_span(self, document: int) -> tuple[int, int]:
        """Tokens [begin, end) of a document."""
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
        """Close files and connections; they open again when read."""
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
                done, begin, shard = left, 0, shard + 1
                left += int(self._starts[shard + 1] - self._starts[shard])
            yield Piece(shard, begin, row[done:])

    def _fill(self, pieces: Sequence[Piece]) -> None:
        layout, stored = self._layout, self._stored
        layout.prepare([piece.shard for piece in pieces])
        found = stored.read([(piece.shard, *layout.span(piece)) for piece in pieces])
        for piece, data in zip(pieces, found, strict=True):
            self._ids.put(layout.values(piece, data), piece.out, stored.path(piece.shard))

    def _require(self, begin: int, end: int) -> None:
        if begin < 0 or end > self.n_tokens:
            raise DataError(
                f"tokens {begin:,} to {end:,} of {self.where} were asked for", allowed=f"0 to {self.n_tokens:,}"
            )

    def _known(self) -> Documents:
        if self._documents is None:
            raise UserError(
                f"{self.where} does not say where its documents begin and end",
                hint="only forms that keep documents apart can be asked (docs/guides/other-formats.md has the table)",
            )
        return self._documents
