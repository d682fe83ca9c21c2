"""Judges which questions are contaminated: found in training documents, by their word 8-grams and 13-grams.

A question is *dirty* by either of two rules; it is *short*, and not judged, with fewer than 8 words; else *clean*.

13-gram: a 13-gram of any of its texts is in 1 to RARE_DOCUMENTS documents (GPT-3, arXiv 2005.14165, appendix C: more
are common phrases).

8-gram: the 8-grams of one document cover COVERED_FRAC of its words. Llama 2 (arXiv 2307.09288, A.6) counts covered
tokens so; PaLM (2204.02311, section 8) uses 8-grams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.data.prepare.contamination.index import Search
from smalti.data.prepare.contamination.ngrams import I64, LONG, SHORT, U64, ngrams, normalised
from smalti.data.prepare.dedup.shingles import word_hashes

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


@dataclass(frozen=True)
class Question:
    """The texts of an item."""

    index: int
    text: str
    """The question with its right answer, without examples; ends with ``answer``."""
    answer: str = ""
    others: tuple[str, ...] = ()
    """Further texts, such as wrong options."""
    id: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts, the question first."""
        return (self.text, *self.others)


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


class _Occurrences(NamedTuple):
    """N-grams of texts: hash, text, and number of the first word in the text."""

    hashes: U64
    text: I64
    place: I64


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of the questions of one task; made once, for the search and for the judgement."""

    questions: Sequence[Question]
    short: _Occurrences
    long: _Occurrences
    question_of_text: I64
    words_of_text: I64
    words_of_answer: I64
    """Of each question."""

    @classmethod
    def of(cls, questions: Sequence[Question]) -> "Ngrams":
        """Normalise and hash the texts of ``questions``."""
        texts = [text for question in questions for text in question.texts]
        owners = np.repeat(np.arange(len(questions)), [len(question.texts) for question in questions])
        words, text_of_word = word_hashes(normalised(pa.array(texts, pa.large_string())))
        starts = np.searchsorted(text_of_word, np.arange(len(texts)))
        short, long = (
            _Occurrences(hashes, text_of_word[first], first - starts[text_of_word[first]])
            for hashes, first in ngrams(words, text_of_word)
        )
        answers = word_hashes(normalised(pa.array([question.answer for question in questions], pa.large_string())))[1]
        return cls(
            questions,
            short,
            long,
            question_of_text=owners,
            words_of_text=np.bincount(text_of_word, minlength=len(texts)),
            words_of_answer=np.bincount(answers, minlength=len(questions)),
        )

    @property
    def hashes(self) -> U64:
        """Hashes of all n-grams; some are repeated."""
        return np.concatenate([self.short.hashes, self.long.hashes])


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

    def documents(self, occurrences: _Occurrences) -> tuple[I64, I64, I64]:
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


def judge(grams: Ngrams, search: Search) -> Judgement:
    """Judge the questions of one task by what the search for their n-grams found."""
    hits = _HitTable(search)
    n = len(grams.questions)
    pairs = _covered(grams, hits)
    frac = np.zeros(n)
    np.maximum.at(frac, pairs.question, pairs.frac)
    rows, owners, n_documents = hits.documents(grams.long)
    rare = n_documents <= RARE_DOCUMENTS
    rare_rows = np.unique(rows[rare])
    n_rare = np.bincount(grams.question_of_text[grams.long.text[rare_rows]], minlength=n)
    long_pairs = np.unique(
        np.stack([grams.question_of_text[grams.long.text[rows[rare]]], owners[rare]], axis=1), axis=0
    )
    by_question: list[dict[int, tuple[float, bool]]] = [{} for _ in range(n)]
    for question, document in long_pairs.tolist():
        by_question[question][document] = (0.0, False)
    for question, document, share, reaches in zip(*(column.tolist() for column in pairs), strict=True):
        if share >= COVERED_FRAC or document in by_question[question]:
            by_question[question][document] = (share, reaches)
    words = grams.words_of_text[np.searchsorted(grams.question_of_text, np.arange(n))]
    items = [
        _item(question, by_question[i], hits, words=int(words[i]), rare=int(n_rare[i]), frac=float(frac[i]))
        for i, question in enumerate(grams.questions)
    ]
    return Judgement(items, {hits.named(document) for documents in by_question for document in documents})


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


def _covered(grams: Ngrams, hits: _HitTable) -> _Pairs:
    """Return the pairs of a question and a document that shares 8-grams with its first text."""
    first_text = np.searchsorted(grams.question_of_text, np.arange(len(grams.questions)))
    in_first = np.flatnonzero(first_text[grams.question_of_text[grams.short.text]] == grams.short.text)
    short = grams.short
    occurrences = _Occurrences(short.hashes[in_first], short.text[in_first], short.place[in_first])
    rows, document, n_documents = hits.documents(occurrences)
    n_words = grams.words_of_text[occurrences.text[rows]]
    counts = (n_documents <= RARE_DOCUMENTS) | (n_words >= COMMON_WORDS)
    rows, document, n_words = rows[counts], document[counts], n_words[counts]
    question, place = grams.question_of_text[occurrences.text[rows]], occurrences.place[rows]
    order = np.lexsort((place, document, question))
    question, document, place, n_words = (column[order] for column in (question, document, place, n_words))
    is_first = (np.diff(question, prepend=-1) != 0) | (np.diff(document, prepend=-1) != 0)
    starts = np.flatnonzero(is_first)
    lasts = np.append(starts[1:], len(place))[: len(starts)] - 1
    # An n-gram covers its words up to the next one's.
    widths = np.minimum(np.diff(place, append=0), SHORT)
    widths[lasts] = SHORT
    covered = np.add.reduceat(widths, starts) if len(starts) else widths
    begin_of_answer = (n_words - grams.words_of_answer[question])[lasts]
    reaches = (place[lasts] + SHORT > begin_of_answer) & (grams.words_of_answer[question[lasts]] > 0)
    return _Pairs(question[starts], document[starts], covered / n_words[starts], reaches)
