"""Words of texts and the spans of words that may repeat, with hashes, for many texts at once in numpy.

A word is a run of characters without blanks, as it is written; of scripts that are written without blanks (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) each character is a word. Equal words have equal hashes, on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.config.build import Repeats
from smalti.data.prepare.dedup.shingles import I64, U64, hash_spans

_GAP = "\n\n"
"""Between two texts: ends words, lines and paragraphs."""
_LINE_END = 10
_LETTER, _BLANK, _WORD = 0, 1, 2
_WORDS = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3001, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF), (0xFF00, 0xFFEF), (0x20000, 0x323AF),
)  # fmt: skip


@dataclass(frozen=True)
class Spans:
    """The words of texts, and the spans of them that may repeat."""

    text_of_word: I64
    starts: I64
    """First character of each word, in its text."""
    stops: I64
    """The character after each word, in its text."""
    firsts: I64
    """First word of each span."""
    lasts: I64
    """The word after each span."""
    hashes: U64
    """Of the words of each span."""


def find_spans(texts: Sequence[str], unit: Repeats, min_words: int) -> Spans:
    """Find words and spans. A passage is ``min_words`` consecutive words; lines and paragraphs have as many or more."""
    codes = np.frombuffer(_GAP.join(texts).encode("utf-32-le"), np.uint32)
    kinds = _kinds()[codes]
    before = np.concatenate([[_BLANK], kinds[:-1]]) if len(kinds) else kinds
    after = np.concatenate([kinds[1:], [_BLANK]]) if len(kinds) else kinds
    starts = np.flatnonzero((kinds == _WORD) | ((kinds == _LETTER) & (before != _LETTER)))
    stops = np.flatnonzero((kinds == _WORD) | ((kinds == _LETTER) & (after != _LETTER))) + 1
    words = hash_spans(codes + np.uint64(1), starts, stops)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    offsets = np.cumsum(lengths + len(_GAP)) - lengths - len(_GAP)
    text_of_word = np.searchsorted(offsets, starts, "right") - 1
    if unit == "passages":
        inside = np.arange(max(len(words) - min_words + 1, 0))
        firsts = inside[text_of_word[inside] == text_of_word[inside + min_words - 1]]
        lasts = firsts + min_words
    else:
        ends = codes == _LINE_END
        if unit == "paragraphs":
            ends = ends & np.concatenate([ends[1:], [False]])
        firsts, lasts = _runs(np.cumsum(ends)[starts])
        long = lasts - firsts >= min_words
        firsts, lasts = firsts[long], lasts[long]
    begin = offsets[text_of_word]
    return Spans(text_of_word, starts - begin, stops - begin, firsts, lasts, hash_spans(words, firsts, lasts))


def repeated(hashes: U64, firsts: I64, lasts: I64, earlier: U64) -> npt.NDArray[np.bool_]:
    """Return which spans are in ``earlier``, or equal to a span that ends before they begin. Spans are in order."""
    _, first_of, which = np.unique(hashes, return_index=True, return_inverse=True)
    came_before = lasts[first_of][which] <= firsts
    return np.asarray(came_before | np.isin(hashes, earlier))


def covered(spans: Spans, which: npt.NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
    """Return (text, first character, end, number of words) of each run of words that are in spans of ``which``."""
    edges = np.zeros(len(spans.starts) + 1, np.int64)
    np.add.at(edges, spans.firsts[which], 1)
    np.add.at(edges, spans.lasts[which], -1)
    words = np.flatnonzero(np.cumsum(edges)[:-1] > 0)
    # A run ends where a word is left out and where a text ends.
    begins, ends = _runs(words - np.arange(len(words)) + spans.text_of_word[words] * (len(spans.starts) + 1))
    first, last = words[begins], words[ends - 1]
    runs: Any = zip(
        spans.text_of_word[first].tolist(), spans.starts[first].tolist(), spans.stops[last].tolist(),
        (ends - begins).tolist(), strict=True,
    )  # fmt: skip
    return list(runs)


def without(text: str, runs: Sequence[tuple[int, int]]) -> str:
    """Cut runs of characters out of ``text``. Of the blanks on both sides of a cut the larger gap stays."""
    edges = [0, *(edge for run in runs for edge in run), len(text)]
    kept = [text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    parts: list[str] = []
    gap = ""
    for number, piece in enumerate(kept):
        body = piece.lstrip()
        lead = piece[: len(piece) - len(body)]
        body = body.rstrip()
        gap = max(gap, lead, key=lambda blanks: (blanks.count("\n"), len(blanks)))
        if body:
            parts += [gap if parts or number == 0 else "", body]
            gap = piece[len(lead) + len(body) :]
    return "".join(parts)


def _runs(values: I64) -> tuple[I64, I64]:
    """Return first place and end of each run of equal values."""
    if not len(values):
        return values, values
    begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return begins, np.concatenate([begins[1:], [len(values)]])


@lru_cache(maxsize=1)
def _kinds() -> npt.NDArray[np.uint8]:
    """Return the kind of each code point."""
    kinds = np.full(0x110000, _LETTER, np.uint8)
    for first, last in _WORDS:
        kinds[first : last + 1] = _WORD
    kinds[[code for code in range(0x3001) if chr(code).isspace()]] = _BLANK
    return kinds
