"""Token ids of rendered conversations, and which of them are in given spans of the text.

A text is encoded as a whole, so that its ids are those of ``apply_chat_template``. Where one token would be on both
sides of a boundary of a span (the line end of a template and that of an answer, as "\\n\\n"), the text is cut there:
the ids of a prompt are then those that a server computes before there is an answer.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from smalti.base.errors import DataError
from smalti.data.tokenizer.chat import BREAK
from smalti.data.tokenizer.encode import Tokenizer
from smalti.tune.chats.spans import Span


@dataclass(eq=False)
class _Piece:
    """A part of a text that is encoded by itself: characters [begin, end), and those at which its tokens begin."""

    begin: int
    end: int
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def encode_spans(
    texts: Sequence[tuple[str, list[Span]]], tokenizer: Tokenizer
) -> list[tuple[list[int], list[int]] | DataError]:
    """Return for each text its ids, without BREAKs, and for each id 1 if it begins in one of the spans, else 0."""
    pieces = [_pieces(text) for text, _ in texts]
    errors: dict[int, DataError] = {}
    added = frozenset(tokenizer.added_tokens.values())
    todo = [(number, piece) for number, parts in enumerate(pieces) for piece in parts]
    while todo:
        located = tokenizer.encode_located([texts[number][0][piece.begin : piece.end] for number, piece in todo])
        again = []
        for (number, piece), (ids, offsets) in zip(todo, located, strict=True):
            piece.ids = ids
            piece.starts = [piece.begin + start for start, _ in offsets]
            boundaries = {place for span in texts[number][1] for place in span}
            ends = [piece.begin + end for _, end in offsets]
            cuts = sorted(place for place in boundaries if _is_inside(place, piece, ends, added))
            if cuts and not _can_cut(tokenizer):
                errors[number] = _joined(texts[number][0], cuts[0])
            elif cuts:
                bounds = [piece.begin, *cuts, piece.end]
                parts = [_Piece(begin, end) for begin, end in pairwise(bounds)]
                place = pieces[number].index(piece)
                pieces[number][place : place + 1] = parts
                again += [(number, part) for part in parts]
        todo = again
    return [errors.get(number) or _masked(parts, texts[number][1]) for number, parts in enumerate(pieces)]


def _pieces(text: str) -> list[_Piece]:
    pieces = []
    begin = 0
    for part in text.split(BREAK):
        if part:
            pieces.append(_Piece(begin, begin + len(part)))
        begin += len(part) + len(BREAK)
    return pieces


def _is_inside(place: int, piece: _Piece, ends: list[int], added: Collection[int]) -> bool:
    """Return whether a token of ``piece`` begins before ``place`` and ends after it.

    Added tokens that take the blanks beside them do not count: these blanks are no tokens anywhere.
    """
    number = bisect_left(piece.starts, place) - 1
    if number < 0 or not piece.begin < place < piece.end:
        return False
    return ends[number] > place and piece.ids[number] not in added


def _can_cut(tokenizer: Tokenizer) -> bool:
    """Return whether the ids of a text are those of its parts: some tokenizers put a blank before every text."""
    return tokenizer.encode("\nx") == tokenizer.encode("\n") + tokenizer.encode("x")


def _joined(text: str, place: int) -> DataError:
    return DataError(
        f"one token has the characters {text[place - 8 : place]!r} and {text[place : place + 8]!r}, of which only one "
        "side is in the loss, and this tokenizer cannot encode them separately",
        hint="remove the blanks at the beginning of the answer",
    )


def _masked(pieces: list[_Piece], spans: list[Span]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    for piece in pieces:
        values = [0] * len(piece.ids)
        for span in spans:
            first, last = (bisect_left(piece.starts, place) for place in span)
            values[first:last] = [1] * (last - first)
        ids += piece.ids
        mask += values
    return ids, mask
