"""Judges which questions are contaminated: found in training documents, by their word 8-grams and 13-grams.

A question is *dirty* by either of two rules; it is *short*, and not judged, with fewer than 8 words; else *clean*.

13-gram: a 13-gram of any of its texts is in 1 to RARE_DOCUMENTS documents (GPT-3, arXiv 2005.14165, appendix C: more
are common phrases).

8-gram: the 8-grams of one document cover COVERED_FRAC of its words. Llama 2 (arXiv 2307.09288, A.6) counts covered
tokens so; PaLM (2204.02311, section 8) uses 8-grams.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smalti.data.prepare.contamination.index import Search
from smalti.data.prepare.contamination.ngrams import I64, LONG, SHORT
from smalti.evals.contamination.questions import Occurrences, Question, QuestionNgrams

RARE_DOCUMENTS = 10
"""An n-gram in more documents is a common phrase."""
COVERED_FRAC = 0.5
"""PaLM takes 0.7 of the 8-grams. With one word in 13 changed 12 of 13 words stay covered, but 5 of 13 8-grams, and at
the ends of a question of 20 words a third of the words; 0.7 of the words misses a quarter of such copies."""
COMMON_WORDS = 2 * LONG
"""In a question of fewer words common n-grams do not cover words: half of it may be one phrase."""

_SOURCE_BITS = 44
_LISTED_DOCUMENTS = 5

CLEAN = "clean"
DIRTY = "dirty"
SHORT_TEXT = "short"
STATUSES = (CLEAN, DIRTY, SHORT_TEXT)


class Document(NamedTuple):
    """A training document: its source, and its number in it."""

    source: str
    document: int


@dataclass(frozen=True)
class Judgement:
    """The result for one task."""

    items: list[dict[str, Any]]
    """For each question: index, id, status, ``words``, ``ngrams_13`` (rare ones that were found), ``covered_frac`` (of
    its words, by one document), ``answer_found`` (a found n-gram has words of the answer), ``n_documents`` and
    ``documents`` (those that make it dirty)."""
    documents: set[Document]
    """All documents that make a question dirty."""

    def counts(self) -> dict[str, int]:
        """Return the number of questions, and of each status."""
        statuses = [item["status"] for item in self.items]
        return {"n": len(statuses), **{status: statuses.count(status) for status in STATUSES}}


class _HitTable:
    """The hits of all sources, by hash; a document is a number with its source in the upper bits."""

    def __init__(self, search: Search) -> None:
        self.sources = list(search.hits)
        hashes = [hits.hashes for hits in search.hits.values()]
        documents = [hits.documents | (i << _SOURCE_BITS) for i, hits in enumerate(search.hits.values())]
        joined = np.concatenate([np.empty(0, np.uint64), *hashes])
        order = np.argsort(joined, kind="stable")
        self._hashes = joined[order]
        self._documents = np.concatenate([np.empty(0, np.int64), *documents])[order]

    def documents(self, occurrences: Occurrences) -> tuple[I64, I64, I64]:
        """Return for each pair of an occurrence and a document its row, the document, and the n-gram's documents."""
        begin = np.searchsorted(self._hashes, occurrences.hashes, side="left")
        counts = np.searchsorted(self._hashes, occurrences.hashes, side="right") - begin
        rows = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self._documents[begin[rows] + nth], counts[rows]

    def named(self, document: int) -> Document:
        return Document(self.sources[document >> _SOURCE_BITS], document & ((1 << _SOURCE_BITS) - 1))


class _Pairs(NamedTuple):
    """Pairs of a question and a document that has n-grams of it."""

    question: I64
    document: I64
    frac: npt.NDArray[np.float64]
    """Share of the question's words that the document's 8-grams cover."""
    reaches_answer: npt.NDArray[np.bool_]


def judge(grams: QuestionNgrams, search: Search) -> Judgement:
    """Judge the questions of one task by what the search for their n-grams found."""
    hits = _HitTable(search)
    n = len(grams.questions)
    pairs = _covered(grams, hits)
    frac = np.zeros(n)
    np.maximum.at(frac, pairs.question, pairs.frac)
    rows, documents, n_documents = hits.documents(grams.long)
    rows, documents = (column[n_documents <= RARE_DOCUMENTS] for column in (rows, documents))
    n_rare = np.bincount(grams.long.question[np.unique(rows)], minlength=n)
    long_pairs = np.unique(np.stack([grams.long.question[rows], documents], axis=1), axis=0)
    by_question: list[dict[int, tuple[float, bool]]] = [{} for _ in range(n)]
    for question, document in long_pairs.tolist():
        by_question[question][document] = (0.0, False)
    for question, document, share, reaches in zip(*(column.tolist() for column in pairs), strict=True):
        if share >= COVERED_FRAC or document in by_question[question]:
            by_question[question][document] = (share, reaches)
    words = grams.n_words
    items = [
        _item(question, by_question[i], hits, words=int(words[i]), rare=int(n_rare[i]), frac=float(frac[i]))
        for i, question in enumerate(grams.questions)
    ]
    return Judgement(items, {hits.named(document) for listed in by_question for document in listed})


def _item(
    question: Question, documents: dict[int, tuple[float, bool]], hits: _HitTable, *, words: int, rare: int, frac: float
) -> dict[str, Any]:
    best = sorted(documents, key=lambda document: (-documents[document][0], document))[:_LISTED_DOCUMENTS]
    return {
        "index": question.index,
        **({} if question.id is None else {"id": question.id}),
        "status": DIRTY if documents else SHORT_TEXT if words < SHORT else CLEAN,
        "words": words,
        "ngrams_13": rare,
        "covered_frac": frac,
        "answer_found": any(reaches for _, reaches in documents.values()),
        "n_documents": len(documents),
        "documents": [{**hits.named(document)._asdict(), "covered_frac": documents[document][0]} for document in best],
    }


def _covered(grams: QuestionNgrams, hits: _HitTable) -> _Pairs:
    """Return the pairs of a question and a document that shares 8-grams with it."""
    rows, document, n_documents = hits.documents(grams.short)
    counts = (n_documents <= RARE_DOCUMENTS) | (grams.n_words[grams.short.question[rows]] >= COMMON_WORDS)
    rows, document = rows[counts], document[counts]
    question, place = grams.short.question[rows], grams.short.place[rows]
    order = np.lexsort((place, document, question))
    question, document, place = (column[order] for column in (question, document, place))
    is_first = (np.diff(question, prepend=-1) != 0) | (np.diff(document, prepend=-1) != 0)
    starts = np.flatnonzero(is_first)
    lasts = np.append(starts[1:], len(place))[: len(starts)] - 1
    # An n-gram covers its words up to the next one's.
    widths = np.minimum(np.diff(place, append=0), SHORT)
    widths[lasts] = SHORT
    words = grams.own_words(place, place + widths)
    covered = np.add.reduceat(words, starts) if len(starts) else words
    question, document = question[starts], document[starts]
    begin_of_answer = grams.end[question] - grams.n_answer_words[question]
    reaches = (place[lasts] + SHORT > begin_of_answer) & (grams.n_answer_words[question] > 0)
    return _Pairs(question, document, covered / grams.n_words[question], reaches)
