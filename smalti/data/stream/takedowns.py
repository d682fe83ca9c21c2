"""Takedowns: reads the list ``data.takedowns`` of documents that must not be learned, and blanks them in rows.

The order does not change. The tokens of such a document become the end-of-document token in inputs, and none is a
target: masking targets alone would leave the text in the context of later documents (``mask_documents: false``) and in
the statistics of routers. Each line of the list is JSON, ``{"source": "web", "document": 1234}``: number or id.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json
from smalti.data.documents.listed import read_listed
from smalti.data.pack.rows import Pieces, RowInfo
from smalti.data.sources.source import Int64s, Source
from smalti.data.tokens.document_ids import IDS_NAME, documents_of


@dataclass(frozen=True)
class Takedowns:
    """The tokens of the documents that are taken down, by source."""

    digest: str
    """Digest of the set of documents."""
    spans: Mapping[str, Int64s]
    """Source -> [documents, 2]: tokens [begin, end), ascending. Only sources with takedowns."""

    @classmethod
    def read(cls, path: str, sources: Mapping[str, Source]) -> Self:
        """Read the list and locate its documents, which takes a few blocks of the source for each."""
        wanted = read_listed(path, sources, kind="takedown", owner="run")
        spans: dict[str, Int64s] = {}
        for name in sorted({source for source, _, _ in wanted}):
            requested = [(document, line) for source, document, line in wanted if source == name]
            numbers = _numbers(requested, sources[name], name, path)
            ranges = sorted({sources[name].document_span(number) for number in numbers})
            spans[name] = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return cls(digest_json({name: array.tolist() for name, array in spans.items()}), spans)

    def to_bytes(self) -> bytes:
        """Serialize for the other ranks."""
        spans = {name: array.tolist() for name, array in self.spans.items()}
        return json.dumps({"digest": self.digest, "spans": spans}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the takedowns that ``to_bytes`` serialized."""
        raw = json.loads(data)
        return cls(raw["digest"], {name: np.array(spans, dtype=np.int64) for name, spans in raw["spans"].items()})


def blank(rows: npt.NDArray[Any], info: RowInfo, pieces: Pieces, spans: Int64s, pad_id: int) -> RowInfo:
    """Blank documents in rows [n, L+1], in place: their tokens become ``pad_id``, and their targets are masked.

    ``info`` and ``pieces`` describe the rows; returns the changed ``info``.
    """
    parts = overlaps(spans, pieces.begin - 1, pieces.begin + pieces.length)
    if not parts:
        return info
    masked = np.zeros(rows[:, 1:].shape, dtype=bool) if info.masked is None else info.masked
    for which, begin, end in parts:
        row = int(pieces.row[which])
        column = int(pieces.column[which])
        first = int(pieces.begin[which])
        if begin < first:  # the token before the piece is an input only; it may be the last target of another piece
            if info.joints is not None:
                info.joints.token[which] = pad_id
            if column == 0:
                rows[row, 0] = pad_id
            begin = first
        targets = slice(column + begin - first, column + end - first)
        masked[row, targets] = True
        rows[row, 1:][targets] = pad_id
    return info._replace(masked=masked)


def overlaps(spans: Int64s, begins: Int64s, ends: Int64s) -> list[tuple[int, int, int]]:
    """Return (i, begin, end) for each overlap of token ranges [begins[i], ends[i]) with the spans of documents."""
    first = np.searchsorted(spans[:, 1], begins, side="right")
    last = np.searchsorted(spans[:, 0], ends, side="left")
    return [
        (which, max(int(begins[which]), int(spans[k, 0])), min(int(ends[which]), int(spans[k, 1])))
        for which in np.flatnonzero(last > first).tolist()
        for k in range(int(first[which]), int(last[which]))
    ]


def _numbers(wanted: Sequence[tuple[int | str, int]], source: Source, name: str, path: str) -> list[int]:
    """Return the numbers of documents given by number or id."""
    if source.n_documents is None:
        raise UserError(
            f"{path}, line {wanted[0][1]}: source '{name}' ({source.where}) does not record where its documents end",
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
