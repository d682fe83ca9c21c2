"""The 25 instructions of IFEval: identifier, verifier, and what their kwargs may be."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from smalti.base.errors import DataError, nearest
from smalti.evals.graders.ifeval import layout, wording
from smalti.evals.graders.ifeval.languages import LANGUAGES
from smalti.evals.graders.ifeval.verdict import Verdict

Verifier = Callable[..., Verdict]

VERIFIERS: dict[str, Verifier] = {
    "change_case:capital_word_frequency": wording.capital_word_frequency,
    "change_case:english_capital": wording.english_capital,
    "change_case:english_lowercase": wording.english_lowercase,
    "combination:repeat_prompt": layout.repeat_prompt,
    "combination:two_responses": layout.two_responses,
    "detectable_content:number_placeholders": layout.number_placeholders,
    "detectable_content:postscript": layout.postscript,
    "detectable_format:constrained_response": layout.constrained_response,
    "detectable_format:json_format": layout.json_format,
    "detectable_format:multiple_sections": layout.multiple_sections,
    "detectable_format:number_bullet_lists": layout.number_bullet_lists,
    "detectable_format:number_highlighted_sections": layout.number_highlighted_sections,
    "detectable_format:title": layout.title,
    "keywords:existence": wording.existence,
    "keywords:forbidden_words": wording.forbidden_words,
    "keywords:frequency": wording.frequency,
    "keywords:letter_frequency": wording.letter_frequency,
    "language:response_language": wording.response_language,
    "length_constraints:nth_paragraph_first_word": layout.nth_paragraph_first_word,
    "length_constraints:number_paragraphs": layout.number_paragraphs,
    "length_constraints:number_sentences": layout.number_sentences,
    "length_constraints:number_words": layout.number_words,
    "punctuation:no_comma": wording.no_comma,
    "startend:end_checker": wording.end_checker,
    "startend:quotation": wording.quotation,
}


def verifier(instruction_id: str, kwargs: Mapping[str, Any], where: str) -> Verifier:
    """Return the verifier of an instruction, its kwargs checked; the message of a DataError begins with ``where``."""
    if instruction_id not in VERIFIERS:
        similar = nearest(instruction_id, VERIFIERS)
        raise DataError(
            f"{where}: there is no instruction {instruction_id!r}",
            allowed=", ".join(VERIFIERS),
            hint=f"did you mean {similar}?" if similar else None,
        )
    function = VERIFIERS[instruction_id]
    names = [name for name in inspect.signature(function).parameters if name != "response"]
    if set(kwargs) != set(names):
        missing = ", ".join(name for name in names if name not in kwargs) or "none"
        unused = ", ".join(name for name in kwargs if name not in names) or "none"
        raise DataError(
            f"{where}: kwargs of {instruction_id}: missing: {missing}; unknown: {unused}",
            allowed=f"exactly {', '.join(names) or 'no kwargs'}",
        )
    for name in names:
        is_right, allowed = _rule(name)
        if not is_right(kwargs[name]):
            raise DataError(f"{where}: {instruction_id}: {name} is {kwargs[name]!r}", allowed=allowed)
    if "nth_paragraph" in kwargs and kwargs["nth_paragraph"] > kwargs["num_paragraphs"]:
        raise DataError(
            f"{where}: {instruction_id}: nth_paragraph is {kwargs['nth_paragraph']}",
            allowed=f"at most num_paragraphs, {kwargs['num_paragraphs']}",
        )
    return function


def _rule(name: str) -> tuple[Callable[[Any], bool], str]:
    """Return the check of a kwarg's value and what is allowed."""
    if name.endswith("relation"):
        return lambda value: value in ("less than", "at least"), "less than, at least"
    if name == "language":
        return lambda value: value in LANGUAGES, ", ".join(LANGUAGES)
    if name == "letter":
        return lambda value: _is_text(value) and len(value) == 1, "one character"
    if name in ("keywords", "forbidden_words"):
        return (
            lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)),
            "a list of at least one string, none of them blank",
        )
    if name.startswith(("num_", "nth_")) or name.endswith("frequency"):
        return lambda value: type(value) is int and value > 0, "a whole number of at least 1"
    return _is_text, "a string that is not blank"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
