"""Windows: consecutive tokens of one document, drawn from sources by a seed, and how often each occurs in them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.base.progress import Progress, no_progress
from smalti.base.rng import derive_key
from smalti.data.order.permutation import Permutation
from smalti.data.sources.source import Int64s, Source
from smalti.data.stream.takedowns import overlaps

_TRIES = 100
"""Places that are tried for each window: most places of short documents have too few tokens after them."""
_CHUNK_TOKENS = 1 << 17
"""Tokens that are hashed at once: ``hash_spans`` is twice as fast on as many as on more."""


@dataclass(frozen=True)
class Windows:
    """Windows of equal length."""

    tokens: Int64s
    """[n, length]"""
    places: list[tuple[str, int]]
    """The source of each, and its first token there."""


def draw(
    sources: Mapping[str, Source], n: int, length: int, *, seed: int, takedowns: Mapping[str, Int64s] | None = None
) -> Windows:
    """Draw ``n`` different places of windows, all places of all sources equally likely; fewer where there are no more.

    ``takedowns``: source -> tokens [begin, end) of documents that are left out. Raises DataError where no document is
    long enough, UserError for a source that does not record where documents end.
    """
    ends = np.cumsum([max(0, source.n_tokens - length + 1) for source in sources.values()], dtype=np.int64)
    limit = min(int(ends[-1]), n * _TRIES) if len(ends) else 0
    tokens: list[Int64s] = []
    places: list[tuple[str, int]] = []
    for first in range(0, limit, n):
        drawn = Permutation(int(ends[-1]), derive_key("windows", seed))(np.arange(first, min(first + n, limit)))
        source_of = np.searchsorted(ends, drawn, "right")
        rows = np.zeros((len(drawn), length), np.int64)
        begins = drawn - np.concatenate([[0], ends])[source_of]
        is_whole = np.zeros(len(drawn), np.bool_)
        for number, (name, source) in enumerate(sources.items()):
            mine = np.flatnonzero(source_of == number)
            read = np.empty((len(mine), length), source.dtype)
            source.read_rows(begins[mine], read)
            rows[mine] = read
            is_whole[mine] = _in_one_document(source, name, begins[mine], read)
            left_out = overlaps(
                (takedowns or {}).get(name, np.empty((0, 2), np.int64)), begins[mine], begins[mine] + length
            )
            is_whole[mine[[which for which, _, _ in left_out]]] = False
        names = list(sources)
        tokens.append(rows[is_whole])
        places += [(names[source_of[row]], int(begins[row])) for row in np.flatnonzero(is_whole)]
        if len(places) >= n:
            break
    if not places:
        raise DataError(
            f"no document of {', '.join(source.where for source in sources.values())} has {length} tokens",
            allowed="windows that fit into documents",
            hint="fewer tokens: --prompt-tokens, --new-tokens",
        )
    return Windows(np.concatenate(tokens)[:n], places[:n])


def _in_one_document(source: Source, name: str, begins: Int64s, rows: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    if source.eod_id is not None:
        return np.asarray((rows != source.eod_id).all(axis=1))
    if source.n_documents is None:
        raise UserError(
            f"source '{name}' ({source.where}) does not record where its documents end",
            allowed="sources that do, such as token files of 'smalti data tokenize'",
        )
    return np.asarray(source.documents_at(begins) == source.documents_at(begins + rows.shape[1] - 1))


def count(windows: Int64s, sources: Mapping[str, Source], progress: Progress = no_progress) -> Int64s:
    """Return how often each window [n, length] occurs in all tokens of ``sources``, [n]. Reads every token once.

    Hashes of 64 bits are compared.
    """
    from smalti.data.prepare.contamination.ngrams import NgramSet
    from smalti.data.prepare.dedup.shingles import hash_spans

    n, length = windows.shape
    firsts = np.arange(n) * length
    hashes = hash_spans(windows.astype(np.uint64).ravel() + np.uint64(1), firsts, firsts + length)
    wanted = NgramSet(hashes)
    counts = np.zeros(len(wanted), np.int64)
    step = max(length, _CHUNK_TOKENS - length + 1)
    total, done = sum(source.n_tokens for source in sources.values()), 0
    for source in sources.values():
        for begin in range(0, source.n_tokens - length + 1, step):
            tokens = np.empty((1, min(step + length - 1, source.n_tokens - begin)), source.dtype)
            source.read_rows(np.array([begin]), tokens)
            firsts = np.arange(tokens.size - length + 1)
            chunk = hash_spans(tokens[0].astype(np.uint64) + np.uint64(1), firsts, firsts + length)
            matching = chunk[wanted.places(chunk)]
            counts += np.bincount(np.searchsorted(wanted.hashes, matching), minlength=len(counts))
            progress("counting the windows", done + begin + len(firsts), total)
        done += source.n_tokens
    progress("counting the windows", total, total)
    return np.asarray(counts[np.searchsorted(wanted.hashes, hashes)])
