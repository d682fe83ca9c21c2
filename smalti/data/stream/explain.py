"""Finds the documents in a batch, and the steps of a run that learn a document. Returns plain values.

A sequence *learns* its targets, so a document is learned where its tokens are targets; the token before a sequence is
only an input. The result equals what the stream returns, with any packing, skips, takedowns and forks. The order is
computed and not replayed, so the last step costs as much as the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from smalti.base import store
from smalti.base.errors import UserError
from smalti.data.sources.source import Int64s, Source
from smalti.data.stream.stream import Row, Stream
from smalti.data.stream.takedowns import Takedowns
from smalti.data.tokens import TokenSource
from smalti.data.tokens.document_ids import IDS_NAME, documents_of, ids_of


@dataclass(frozen=True)
class Place:
    """The step, row and rank of a position."""

    position: int
    step: int
    row: int
    """Row of the global batch."""
    rank: int
    """The rank that trains on the row, for the world size of the ``Explanation``."""


@dataclass(frozen=True)
class Document:
    """A document, and its tokens [begin, end) in the source, including the closing token."""

    source: str
    number: int
    id: str | None
    begin: int
    end: int


class Explanation:
    """Queries of the documents and positions of one stream."""

    def __init__(self, stream: Stream, *, world_size: int = 1, takedowns: Takedowns | None = None) -> None:
        """``world_size``: number of ranks that share the rows; the order does not depend on it."""
        self.stream = stream
        self.schedule = stream.schedule
        self.world_size = world_size
        self._takedowns = takedowns.spans if takedowns else {}

    def place(self, position: int) -> Place:
        """Return step, row and rank of a position. UserError if it is outside the run."""
        if not 0 <= position < self.schedule.total_positions:
            raise UserError(
                f"position {position:,} is outside the run", allowed=f"0 to {self.schedule.total_positions - 1:,}"
            )
        step = int(self.schedule.step_of([position])[0])
        row = position - self.schedule.first_position(step)
        # rank r has rows [n r // W, n (r + 1) // W)
        return Place(position, step, row, ((row + 1) * self.world_size - 1) // self.schedule.rows(step))

    def step(self, step: int, *, rows: Sequence[int] | None = None, ids: bool = True) -> dict[str, Any]:
        """Return rows of a step (None: all), each with its source, epoch, pieces and documents."""
        n = self.schedule.rows(step)
        wanted = range(n) if rows is None else rows
        for row in wanted:
            if not 0 <= row < n:
                raise UserError(f"row {row} is outside a batch of {n} sequences", allowed=f"0 to {n - 1}")
        all_rows = self.stream.rows_of(step)
        chosen = [all_rows[row] for row in wanted]
        documents = self._documents(chosen)
        if ids:
            self._add_ids(documents)
        span = next(span for span in reversed(self.schedule.spans) if span.start_step <= step)
        seq_len = self.schedule.seq_len(step)
        return {
            "step": step,
            "stage": span.stage,
            "era": self.schedule.segment(step),
            "seq_len": seq_len,
            "sequences": n,
            "first_position": self.schedule.first_position(step),
            "world_size": self.world_size,
            "rows": [self._row(row, parts, seq_len) for row, parts in zip(chosen, documents, strict=True)],
        }

    def rows_of_rank(self, step: int, rank: int) -> range:
        """Return the rows of a step that a rank has. UserError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise UserError(
                f"rank {rank} is outside a world of {self.world_size} ranks", allowed=f"0 to {self.world_size - 1}"
            )
        n = self.schedule.rows(step)
        return range(n * rank // self.world_size, n * (rank + 1) // self.world_size)

    def document(self, source: str, which: str) -> Document:
        """Find a document by number, or by id (``id=...`` for an id that looks like a number)."""
        if source not in self.stream.opened:
            raise UserError(f"'{source}' is not a source of this run", allowed=", ".join(self.stream.sources))
        opened = self.stream.opened[source]
        if opened.n_documents is None:
            raise UserError(
                f"source '{source}' ({opened.where}) does not record where its documents end",
                allowed="a source that does, such as token files of 'smalti data tokenize'",
            )
        number, name = _number(opened, which)
        if not 0 <= number < opened.n_documents:
            raise UserError(f"source '{source}' has no document {number:,}", allowed=f"0 to {opened.n_documents - 1:,}")
        begin, end = opened.document_span(number)
        return Document(source, number, name or _ids(opened, [number]).get(number), begin, end)

    def sightings(self, document: Document) -> list[dict[str, Any]]:
        """Return every sequence of the run that learns a token of the document, by position.

        ``learned_tokens``: number of the document's tokens that are targets in the sequence; ``tokens``: their ranges
        [begin, end) in the document.
        """
        sightings: list[dict[str, Any]] = []
        source = self.stream.sources.index(document.source)
        for segment, epoch in self._epochs(source):
            indexes = self.stream.sequences_holding(document.source, document.begin, document.end, segment)
            for position in self._positions(source, epoch, indexes):
                sightings.append(
                    {**vars(self.place(position)), "epoch": epoch, "seq_len": self.schedule.segments[segment].seq_len}
                )
        sightings.sort(key=lambda sighting: int(sighting["position"]))
        rows: dict[int, list[Row]] = {}
        for sighting in sightings:
            step = int(sighting["step"])
            if step not in rows:
                rows = {step: self.stream.rows_of(step)}
            row = rows[step][int(sighting["row"])]
            inside = [(max(a, document.begin), min(b, document.end)) for a, b in row.pieces]
            inside = [(a, b) for a, b in inside if a < b]
            sighting["sequence"] = row.index
            sighting["learned_tokens"] = sum(b - a for a, b in inside)
            sighting["tokens"] = [(a - document.begin, b - document.begin) for a, b in inside]
        return sightings

    def is_taken_down(self, document: Document) -> bool:
        """Whether the run blanks the document."""
        return self._is_blanked(document.source, document.begin)

    def _epochs(self, source: int) -> list[tuple[int, int]]:
        """Return (segment, epoch) of all epochs of a source that the run begins."""
        ends = [*(segment.start_step for segment in self.schedule.segments[1:]), self.schedule.total_steps]
        begun = [0, *(int(self.stream.order.epochs_begun(end)[source]) for end in ends)]
        return [(segment, epoch) for segment in range(len(ends)) for epoch in range(begun[segment], begun[segment + 1])]

    def _positions(self, source: int, epoch: int, indexes: Int64s) -> list[int]:
        """Return the positions of sequences of an epoch, without those that the run does not reach or skips."""
        try:
            return [int(at) for at in self.stream.order.position_of(source, epoch, indexes)]
        except UserError:
            if indexes.size == 1:
                return []
            half = indexes.size // 2
            return [at for part in (indexes[:half], indexes[half:]) for at in self._positions(source, epoch, part)]

    def _row(self, row: Row, documents: list[dict[str, Any]], seq_len: int) -> dict[str, Any]:
        place = self.place(row.position)
        learned = sum(end - begin for begin, end in row.pieces)
        return {
            **vars(place),
            "source": row.source,
            "epoch": row.epoch,
            "sequence": row.index,
            "pieces": row.pieces,
            "padding_tokens": seq_len - learned,
            "documents": documents,
        }

    def _documents(self, rows: Sequence[Row]) -> list[list[dict[str, Any]]]:
        """Return the documents in each row, found by the closing tokens in its pieces."""
        documents: list[list[dict[str, Any]]] = [[] for _ in rows]
        for name, source in self.stream.opened.items():
            pieces = [(k, begin, end) for k, row in enumerate(rows) if row.source == name for begin, end in row.pieces]
            for (k, begin, _), parts in zip(pieces, _parts(source, [piece[1:] for piece in pieces]), strict=True):
                column = sum(part["end"] - part["begin"] for part in documents[k])
                for a, b, number, closed in parts:
                    part: dict[str, Any] = {"number": number, "id": None, "begin": begin + a, "end": begin + b}
                    part |= {"column": column + a, "closed": closed, "taken_down": self._is_blanked(name, begin + a)}
                    documents[k].append(part)
        for row, row_parts in zip(rows, documents, strict=True):
            for part in row_parts:
                part["source"] = row.source
        return documents

    def _add_ids(self, documents: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Set the ids of the documents of sources that have ids."""
        parts = [part for row in documents for part in row]
        for name, source in self.stream.opened.items():
            named = [part for part in parts if part["source"] == name and part["number"] is not None]
            names = _ids(source, sorted({part["number"] for part in named}))
            for part in named:
                part["id"] = names.get(part["number"])

    def _is_blanked(self, source: str, token: int) -> bool:
        spans = self._takedowns.get(source)
        if spans is None:
            return False
        at = int(np.searchsorted(spans[:, 0], token, side="right")) - 1
        return at >= 0 and token < int(spans[at, 1])


_Part = tuple[int, int, int | None, bool]
"""(begin, end, document number, whether the document ends there) of tokens [begin, end) of a piece."""


def _parts(source: Source, pieces: Sequence[tuple[int, int]]) -> list[list[_Part]]:
    """Split each piece [begin, end) into its documents; returns no parts if the source does not record documents."""
    if isinstance(source, TokenSource) or source.n_documents is None:
        return _parts_by_closing_token(source, pieces)
    parts: list[list[_Part]] = []
    for begin, end in pieces:
        # The token after the piece, if there is one, shows whether the last document continues.
        numbers = source.documents_at(np.arange(begin, min(end + 1, source.n_tokens), dtype=np.int64))
        edges = [0, *(np.flatnonzero(np.diff(numbers[: end - begin])) + 1).tolist(), end - begin]
        last_is_closed = end == source.n_tokens or bool(numbers[-1] != numbers[-2])
        parts.append([(a, b, int(numbers[a]), b < end - begin or last_is_closed) for a, b in pairwise(edges)])
    return parts


def _parts_by_closing_token(source: Source, pieces: Sequence[tuple[int, int]]) -> list[list[_Part]]:
    parts: list[list[_Part]] = [[] for _ in pieces]
    if source.eod_id is None:
        return parts
    firsts: list[int] | None = None
    if source.n_documents is not None:
        firsts = source.documents_at(np.array([begin for begin, _ in pieces], dtype=np.int64)).tolist()
    lengths = np.array([end - begin for begin, end in pieces], dtype=np.int64)
    for length in np.unique(lengths).tolist():  # a source reads rows of equal length together
        which = np.flatnonzero(lengths == length).tolist()
        tokens = np.empty((len(which), length), dtype=source.dtype)
        source.read_rows(np.array([pieces[k][0] for k in which], dtype=np.int64), tokens)
        for k, row in zip(which, tokens, strict=True):
            marks = (np.flatnonzero(row == source.eod_id) + 1).tolist()
            edges = [0, *marks, *([length] if not marks or marks[-1] < length else [])]
            parts[k] = [
                (a, b, None if firsts is None else firsts[k] + nth, b in marks)
                for nth, (a, b) in enumerate(pairwise(edges))
            ]
    return parts


def _number(source: Source, which: str) -> tuple[int, str | None]:
    """Return the number of a document, and its id if it was given by id."""
    if which.isdecimal():
        return int(which), None
    name = which.removeprefix("id=")
    numbers = documents_of(source.where, [name]).get(name, [])
    if not numbers:
        raise UserError(
            f"no document of {source.where} has the id '{name}'",
            allowed="an id of its ids.parquet, or a number",
            hint="smalti data inspect shows some documents",
        )
    if len(numbers) > 1:
        shown = ", ".join(map(str, numbers[:10]))
        raise UserError(
            f"{len(numbers)} documents of {source.where} have the id '{name}'", allowed=f"a number: {shown}"
        )
    return numbers[0], name


def _ids(source: Source, numbers: Sequence[int]) -> Mapping[int, str]:
    """Return number -> id; empty if the source has no ids."""
    if not numbers or not store.exists(store.join(source.where, IDS_NAME)):
        return {}
    return dict(zip(numbers, ids_of(source.where, numbers), strict=True))
