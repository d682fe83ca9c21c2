"""The texts of items, and their word n-grams without those of a template.

A template is text that many items of a task share, such as an instruction or solved examples: it is in documents that
have nothing of the item.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.data.prepare.contamination.ngrams import I64, LONG, SHORT, U64, ngrams, normalised
from smalti.data.prepare.dedup.shingles import word_hashes
from smalti.evals.tasks.items import Item

TEMPLATE_ITEMS = 20
TEMPLATE_FRAC = 0.01
"""An 8-gram is of a template if more than TEMPLATE_ITEMS items of its task, and more than this share of them, have it.
A passage has fewer questions."""


@dataclass(frozen=True)
class Question:
    """The texts of an item."""

    index: int
    text: str
    """The question with its right answer, without shots; ends with ``answer``."""
    answer: str = ""
    others: tuple[str, ...] = ()
    """Further texts, such as wrong options."""
    id: str | None = None


def questions_of(items: Iterable[Item]) -> list[Question]:
    """Return the texts of each item: the question with its right answer, and its other options or reasoning."""
    questions = []
    for item in items:
        if len(item.contexts) > 1:
            answer, context, others = item.choices[0], item.contexts[item.gold], item.contexts
        elif item.choices:
            answer, context, others = item.choices[item.gold], item.prompt, item.choices
        else:
            answer, context, others = item.answers[0], item.prompt, (item.reasoning or "",)
        rest = tuple(text for text in others if text and text not in (context, answer))
        questions.append(Question(item.index, f"{context} {answer}", answer, rest, item.id))
    return questions


class Occurrences(NamedTuple):
    """N-grams in texts: hash, question, and number of the first word (words are counted through all texts)."""

    hashes: U64
    question: I64
    place: I64

    def where(self, mask: npt.NDArray[np.bool_]) -> "Occurrences":
        """Return a part of them."""
        return Occurrences(*(column[mask] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class QuestionNgrams:
    """The n-grams of the questions of one task; made once, for the search and for the judgement."""

    questions: Sequence[Question]
    short: Occurrences
    """8-grams of the first text of each question that have a word outside the template."""
    long: Occurrences
    """13-grams of all texts that have 8 words or more outside the template."""
    own_before: I64
    """[words + 1]: words before each that are outside the template."""
    begin: I64
    """First word of each question's first text."""
    end: I64
    n_answer_words: I64
    """Words of each question's answer."""

    @classmethod
    def of(cls, questions: Sequence[Question]) -> "QuestionNgrams":
        """Normalise and hash the texts of ``questions``."""
        # All first texts, then all others.
        texts = [question.text for question in questions]
        owners = list(range(len(questions)))
        for number, question in enumerate(questions):
            texts += question.others
            owners += [number] * len(question.others)
        words, text_of_word = word_hashes(normalised(pa.array(texts, pa.large_string())))
        bounds = np.searchsorted(text_of_word, np.arange(len(questions) + 1))
        question_of_word = np.asarray(owners, np.int64)[text_of_word]
        short, long = (
            Occurrences(hashes, question_of_word[first], first) for hashes, first in ngrams(words, text_of_word)
        )
        template = _covered_words(short.place[_shared(short, len(questions))], len(words))
        own_before = np.concatenate([[0], np.cumsum(~template)])
        answers = word_hashes(normalised(pa.array([question.answer for question in questions], pa.large_string())))[1]
        return cls(
            questions,
            short.where((short.place < bounds[-1]) & (_between(own_before, short.place, SHORT) > 0)),
            long.where(_between(own_before, long.place, LONG) >= SHORT),
            own_before,
            begin=bounds[:-1],
            end=bounds[1:],
            n_answer_words=np.bincount(answers, minlength=len(questions)),
        )

    @property
    def hashes(self) -> U64:
        """Hashes of all n-grams; some are repeated."""
        return np.concatenate([self.short.hashes, self.long.hashes])

    @property
    def n_words(self) -> I64:
        """Words of each question's first text that are outside the template."""
        return self.own_words(self.begin, self.end)

    def own_words(self, begin: I64, end: I64) -> I64:
        """Count the words of spans [begin, end) that are outside the template."""
        return np.asarray(self.own_before[end] - self.own_before[begin])


def _between(own_before: I64, place: I64, width: int) -> I64:
    return np.asarray(own_before[place + width] - own_before[place])


def _shared(occurrences: Occurrences, n_questions: int) -> npt.NDArray[np.bool_]:
    """Return which 8-grams are of a template."""
    order = np.lexsort((occurrences.question, occurrences.hashes))
    hashes, question = occurrences.hashes[order], occurrences.question[order]
    is_new = np.diff(hashes, prepend=~hashes[:1]) != 0
    is_pair = is_new | (np.diff(question, prepend=-1) != 0)
    group = np.cumsum(is_new) - 1
    n_items = np.bincount(group[is_pair], minlength=1)
    shared = np.zeros(len(hashes), np.bool_)
    shared[order] = n_items[group] > max(TEMPLATE_ITEMS, TEMPLATE_FRAC * n_questions)
    return shared


def _covered_words(places: I64, n_words: int) -> npt.NDArray[np.bool_]:
    """Return which words are in one of the 8-grams that begin at ``places``."""
    size = n_words + SHORT + 1
    changes = np.bincount(places, minlength=size) - np.bincount(places + SHORT, minlength=size)
    return np.asarray(np.cumsum(changes)[:n_words] > 0)
