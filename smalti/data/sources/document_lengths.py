"""Computes the lengths of a source's documents, and statistics of them for each context length.

A length counts the tokens of a document without its closing token. A large source is sampled; each document is in the
sample with the same probability, whatever its length. Values that depend on where rows are cut (concat) are means over
all cuts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.units import format_frac
from smalti.data.sources.source import Int64s, Source

CONTEXT_TOKENS = tuple(1 << power for power in range(8, 18))
"""256 to 131,072."""
_ALWAYS_TOKENS = 2048
_SCAN_TOKENS = 1 << 22
_BLOCK_TOKENS = 1 << 20
_MIN_BLOCKS = 64
_MAX_NUMBERED_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Documents:
    """Documents of a source: the first token of each, and its length in tokens."""

    begins: Int64s
    lengths: Int64s
    note: str | None
    """Description of the sample; None if these are all documents."""


def find_documents(source: Source, limit_tokens: int) -> Documents | None:
    """Find all documents of a source of at most ``limit_tokens`` tokens, or a sample of a larger one.

    The sample has the documents that begin in evenly spaced blocks, each read to its end. A source without an
    end-of-document token whose documents are numbered is sampled by evenly spaced numbers. None if it has neither.
    """
    if source.eod_id is not None:
        return _by_closing_tokens(source, source.eod_id, limit_tokens)
    return None if source.n_documents is None else _by_number(source, source.n_documents)


def _by_number(source: Source, n_documents: int) -> Documents:
    n = min(n_documents, _MAX_NUMBERED_DOCUMENTS)
    spans = np.array([source.document_span((2 * i + 1) * n_documents // (2 * n)) for i in range(n)], dtype=np.int64)
    note = None if n == n_documents else f"lengths are of {n:,} documents, evenly spaced among {n_documents:,}"
    return Documents(spans[:, 0], spans[:, 1] - spans[:, 0], note)


def _by_closing_tokens(source: Source, eod_id: int, limit_tokens: int) -> Documents:
    n = source.n_tokens
    block_tokens = min(_BLOCK_TOKENS, -(-limit_tokens // _MIN_BLOCKS))
    n_blocks = -(-limit_tokens // block_tokens)
    spans = [(0, n)]
    note = None
    if n > limit_tokens:
        spans = [(i * n // n_blocks, min(i * n // n_blocks + block_tokens, n)) for i in range(n_blocks)]
        frac = sum(stop - start for start, stop in spans) / n
        note = (
            f"lengths are of the documents that begin in {n_blocks:,} evenly spaced blocks of {block_tokens:,} tokens, "
            f"{format_frac(frac)} of all"
        )
    bounds = [_documents_from(source, eod_id, start, stop) for start, stop in spans]
    begins = np.concatenate([begins for begins, _ in bounds])
    return Documents(begins, np.concatenate([ends for _, ends in bounds]) - begins, note)


def length_summary(lengths: Int64s, unit: str) -> dict[str, Any]:
    """Return count, mean, median, 90th percentile, longest, and a histogram with bins [0], [1], [2, 3], [4, 7] ..."""
    if not lengths.size:
        return {"unit": unit, "documents": 0, "histogram": []}
    # bit length of each value, exact below 2**53
    bins = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    bins[lengths == 0] = 0
    counts = np.bincount(bins)
    return {
        "unit": unit,
        "documents": int(lengths.size),
        "mean": round(float(lengths.mean()), 1),
        "median": int(np.median(lengths)),
        "p90": int(np.percentile(lengths, 90)),
        "longest": int(lengths.max()),
        "histogram": [
            {"from": 2 ** (number - 1) if number else 0, "to": 2**number - 1 if number else 0, "documents": int(count)}
            for number, count in enumerate(counts)
            if number >= int(bins.min())
        ],
    }


def context_summary(lengths: Int64s) -> list[dict[str, Any]]:
    """Return statistics of the documents for each context length L, up to the first L that no document reaches.

    ``in_long_documents_frac``: share of tokens in documents of L tokens or more. ``seen_concat_tokens``: mean number of
    preceding tokens of its own document in the row of a token, for rows of L tokens cut from the concatenated
    documents; ``seen_best_fit_tokens``: the same if only documents longer than L are cut, every L tokens.
    ``cut_concat_frac`` and ``cut_best_fit_frac``: share of documents in more than one row.
    """
    return list(_contexts(lengths)) if lengths.size and lengths.any() else []


def length_curve(lengths: Int64s) -> dict[str, list[float]]:
    """Return ``tokens_in_document``, lengths up to the longest in steps of a fifth, and ``in_longer_frac``, the share
    of all tokens in documents of at least that length, which falls from 1."""
    values, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if not values.size:
        return {"tokens_in_document": [], "in_longer_frac": []}
    tokens = values * counts
    at_least = np.cumsum(tokens[::-1])[::-1] / tokens.sum()
    points = np.append(2 ** np.arange(np.floor(np.log2(values[0])), np.log2(values[-1]), 0.25), values[-1])
    frac = at_least[np.searchsorted(values, points)]
    return {"tokens_in_document": points.round(2).tolist(), "in_longer_frac": frac.round(6).tolist()}


def _contexts(lengths: Int64s) -> Iterator[dict[str, Any]]:
    n_tokens = int(lengths.sum())
    for size in CONTEXT_TOKENS:
        in_long = float(lengths[lengths >= size].sum() / n_tokens)
        # a row ends inside the document, or between it and its closing token, at one of ``length`` of ``size`` places
        cut_concat = float(np.minimum(lengths / size, 1).mean())
        yield {
            "context_tokens": size,
            "in_long_documents_frac": in_long,
            "seen_concat_tokens": float(_seen_concat(lengths, size).sum() / n_tokens),
            "seen_best_fit_tokens": float(_seen_best_fit(lengths, size).sum() / n_tokens),
            "cut_concat_frac": cut_concat,
            "cut_best_fit_frac": float((lengths >= size).mean()),
        }
        if in_long == 0 and size >= _ALWAYS_TOKENS:
            return


def _seen_concat(lengths: Int64s, size: int) -> npt.NDArray[np.float64]:
    """Return for each document the sum over its tokens i of E[min(i, o)], with o uniform over 0 .. size-1.

    o is the index in the row. E is i - i (i + 1) / (2 size) for i < size, and (size - 1) / 2 beyond.
    """
    short = np.minimum(lengths, size).astype(np.float64)
    sum_i = short * (short - 1) / 2
    sum_ii = (short - 1) * short * (2 * short - 1) / 6
    return np.asarray(sum_i - (sum_ii + sum_i) / (2 * size) + (lengths - short) * (size - 1) / 2)


def _seen_best_fit(lengths: Int64s, size: int) -> npt.NDArray[np.float64]:
    """Return for each document the sum of i modulo size over its tokens i."""
    whole, rest = np.divmod(lengths.astype(np.float64), size)
    return np.asarray(whole * size * (size - 1) / 2 + rest * (rest - 1) / 2)


def _documents_from(source: Source, eod_id: int, start: int, stop: int) -> tuple[Int64s, Int64s]:
    """Return the first tokens [n] of the documents that begin in [start, stop), and their closing tokens [n]."""
    marks = _marks(source, eod_id, max(0, start - 1), stop)
    begins = np.concatenate([np.zeros(int(start == 0), dtype=np.int64), marks + 1])
    begins = begins[begins < stop]
    scan_tokens = max(1, (stop - start) // 16)
    while begins.size and (not marks.size or marks[-1] < begins[-1]):  # the last document continues after the block
        if stop == source.n_tokens:
            marks = np.append(marks, stop)
            break
        before = stop
        stop = min(stop + scan_tokens, source.n_tokens)
        scan_tokens = min(2 * scan_tokens, _SCAN_TOKENS)
        marks = np.append(marks, _marks(source, eod_id, before, stop)[:1])
    return begins, marks[np.searchsorted(marks, begins)]


def _marks(source: Source, eod_id: int, start: int, stop: int) -> Int64s:
    """Return the positions of closing tokens in [start, stop)."""
    marks = [np.empty(0, dtype=np.int64)]
    buffer = np.empty((1, min(_SCAN_TOKENS, stop - start)), dtype=source.dtype)
    for begin in range(start, stop, _SCAN_TOKENS):
        part = buffer[:, : stop - begin]
        source.read_rows(np.array([begin], dtype=np.int64), part)
        marks.append(np.flatnonzero(part[0] == eod_id) + begin)
    return np.concatenate(marks)
