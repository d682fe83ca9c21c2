"""Documents that must not be learned: reads the list ``data.takedowns`` and blanks them in rows.

A taken-down document keeps its place, so the order of training stays. In the rows each of its tokens becomes the
end-of-document token, as an input, and none of them is a target. Masking the targets alone would leave the text in the
context of what follows where ``mask_documents`` is false, and in the statistics of a router.

The list is lines of JSON, ``{"source": "web", "document": 1234}``: its number in the source from 0, or its id.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json
from smalti.data.pack.rows import Filled, Pieces
from smalti.data.sources.source import Int64s, Source
from smalti.data.tokens.document_ids import IDS_NAME, documents_of


@dataclass(frozen=True)
class Takedowns:
    """Tokens of taken-down documents, source by source."""

    digest: str
    """Names the set of documents."""
    spans: Mapping[str, Int64s]
    """Source -> [documents, 2]: tokens [begin, end), rising. Sources without any are left out."""

    @classmethod
    def read(cls, path: str, sources: Mapping[str, Source]) -> Self:
        """Read the list and look its documents up; a few blocks of the source are read for each."""
        wanted = _lines(path, sources)
        spans: dict[str, Int64s] = {}
        for name in sorted({source for source, _, _ in wanted}):
            requested = [(document, line) for source, document, line in wanted if source == name]
            numbers = _numbers(requested, sources[name], name, path)
            found = sorted({sources[name].document_span(number) for number in numbers})
            spans[name] = np.array(found, dtype=np.int64).reshape(-1, 2)
        return cls(digest_json({name: array.tolist() for name, array in spans.items()}), spans)

    def to_bytes(self) -> bytes:
        """For the other ranks."""
        spans = {name: array.tolist() for name, array in self.spans.items()}
        return json.dumps({"digest": self.digest, "spans": spans}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What ``to_bytes`` gave."""
        raw = json.loads(data)
        return cls(raw["digest"], {name: np.array(spans, dtype=np.int64) for name, spans in raw["spans"].items()})


def blank(rows: npt.NDArray[Any], filled: Filled, pieces: Pieces, spans: Int64s, fill_id: int) -> Filled:
    """Take documents out of rows [n, L+1], in place: ``fill_id`` for their tokens, no target for them.

    ``filled`` and ``pieces`` describe the rows; returns ``filled`` with what changed in it.
    """
    found = touched(spans, pieces.begin - 1, pieces.begin + pieces.length)
    if not found:
        return filled
    masked = np.zeros(rows[:, 1:].shape, dtype=bool) if filled.masked is None else filled.masked
    for which, begin, end in found:
        row, column, first = int(pieces.row[which]), int(pieces.column[which]), int(pieces.begin[which])
        if begin < first:  # the token before the piece is an input only, and may be the last target of another piece
            if filled.joints is not None:
                filled.joints.token[which] = fill_id
            if column == 0:
                rows[row, 0] = fill_id
            begin = first
        targets = slice(column + begin - first, column + end - first)
        masked[row, targets] = True
        rows[row, 1:][targets] = fill_id
    return Filled(filled.joints, masked)


def touched(spans: Int64s, begins: Int64s, ends: Int64s) -> list[tuple[int, int, int]]:
    """(which, begin, end) for each overlap of token ranges [begins[i], ends[i]) with the spans of documents."""
    first = np.searchsorted(spans[:, 1], begins, side="right")
    last = np.searchsorted(spans[:, 0], ends, side="left")
    return [
        (which, max(int(begins[which]), int(spans[k, 0])), min(int(ends[which]), int(spans[k, 1])))
        for which in np.flatnonzero(last > first).tolist()
        for k in range(int(first[which]), int(last[which]))
    ]


def _lines(path: str, sources: Mapping[str, Any]) -> list[tuple[str, int | str, int]]:
    found = []
    for line, text in enumerate(store.read_text(path).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path}, line {line} is not JSON: {error}") from error
        if not isinstance(raw, dict) or set(raw) != {"source", "document"}:
            raise DataError(
                f"{path}, line {line}: {text.strip()[:100]}",
                allowed='{"source": NAME, "document": NUMBER or "ID"}, and nothing else',
            )
        source, document = raw["source"], raw["document"]
        if not isinstance(source, str) or source not in sources:
            raise DataError(
                f"{path}, line {line}: {source!r} is not a source of this run", allowed=", ".join(sorted(sources))
            )
        if isinstance(document, bool) or not isinstance(document, int | str):
            raise DataError(f"{path}, line {line}: document {document!r}", allowed="a whole number, or an id in quotes")
        found.append((source, document, line))
    return found


def _numbers(wanted: Sequence[tuple[int | str, int]], source: Source, name: str, path: str) -> list[int]:
    """Numbers of documents given by number or id."""
    if source.n_documents is None:
        raise UserError(
            f"{path}, line {wanted[0][1]}: source '{name}' ({source.where}) does not say where its documents end",
            allowed="takedowns from sources that do, such as token files of 'smalti data tokenize'",
        )
    by_id = {document: line for document, line in wanted if isinstance(document, str)}
    places = documents_of(source.where, list(by_id)) if by_id else {}
    numbers: list[int] = []
    for document, line in wanted:
        matches = places.get(document, []) if isinstance(document, str) else [document]
        if not matches or not 0 <= matches[0] < source.n_documents:
            raise DataError(
                f"{path}, line {line}: source '{name}' ({source.where}) has no document {document!r}",
                allowed=f"0 to {source.n_documents - 1:,}, or an id of its {IDS_NAME}",
            )
        numbers += matches
    return numbers
