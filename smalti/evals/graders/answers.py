"""Grades generated answers.

``as_published`` is the rule of LLM Foundry 0.3: after the last delimiter, an answer is right if it starts with a right
one. ``exact`` corrects it: the whole answer must be equal, numbers as numbers, and an answer without the delimiter is
not parsed.
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "‘’´`"), " ")  # noqa: RUF001 (quotation marks on purpose)
_NUMBER = re.compile(r"([-+]?[$€£]?\s?|[$€£]\s?-)(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")
_LONGEST_NUMBER = 1000
"""In characters; Python refuses to convert more than 4,300 digits."""


@dataclass(frozen=True)
class Grade:
    """The answer that was found in a text (None: there is none), and whether it is right."""

    parsed: str | None
    correct: bool


def normalized(text: str) -> str:
    """Return the text without case, punctuation, articles and extra blanks, as TriviaQA's evaluation compares it."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def as_published(text: str, answers: Sequence[str], *, delimiter: str, stop: Sequence[str], normalize: bool) -> Grade:
    """Grade by LLM Foundry's rule. An empty right answer makes every answer right."""
    clean = normalized if normalize else str.strip
    parsed = _before_stop(text, stop)
    if delimiter:
        parsed = parsed.split(delimiter)[-1]
    cleaned = clean(parsed)
    return Grade(cleaned, any(cleaned.startswith(clean(answer)) for answer in answers))


def exact(text: str, answers: Sequence[str], *, delimiter: str, stop: Sequence[str], normalize: bool) -> Grade:
    """Grade the whole answer: after the last delimiter, and without reasoning only the first line."""
    parsed = _before_stop(text, stop)
    if delimiter:
        _, marker, parsed = parsed.rpartition(delimiter)
        if not marker:
            return Grade(None, False)
    parsed = parsed.strip()
    if not delimiter and not stop:
        parsed = parsed.split("\n")[0].strip()
    if not parsed:
        return Grade(None, False)
    values = {answer: number(answer) for answer in answers}
    if values[answers[0]] is not None:
        value = leading_number(parsed)
        is_right = value is not None and value in values.values()
        answers = [answer for answer in answers if values[answer] is None]
        if is_right or not answers:
            return Grade(None if value is None else parsed, is_right)
    labels = {normalized(answer) if normalize else answer.strip() for answer in answers} - {""}
    if normalize and labels:
        return Grade(parsed, normalized(parsed) in labels)
    return Grade(parsed, parsed in {answer.strip() for answer in answers})


def verbatim(text: str, answers: Sequence[str]) -> Grade:
    """Grade all of the text, as it is but for white space around it."""
    parsed = text.strip()
    return Grade(parsed or None, parsed != "" and parsed in {answer.strip() for answer in answers})


def number(text: str) -> Fraction | None:
    """Return the number that the whole text is (``$1,250.50``, ``-3``, ``18.``, ``5%``), or None."""
    text = text.strip().removesuffix(".").removesuffix("%")
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    digits = re.sub(r"[^\d.-]", "", text)
    return Fraction(digits) if match and re.search(r"\d", digits) else None


def leading_number(text: str) -> Fraction | None:
    """Return the number at the start of an answer (``18 dollars``); None for ``18/20``, ``1802b`` or no number."""
    match = _NUMBER.match(text)
    if match is None or re.match(r"[\w/^]|[.,:]\d", text[match.end() :]):
        return None
    return number(match[0])


def _before_stop(text: str, stop: Sequence[str]) -> str:
    return re.split("|".join(map(re.escape, stop)), text)[0] if stop else text
