"""Verifiers of the words and letters of a response: keywords, language, case, punctuation, first and last words.

Each takes the response, which is not blank, and the instruction's kwargs; its docstring says where the official and
the fixed verdict differ. An official verdict for which the published checker raises an exception is False.
"""

import re

# ruff: noqa: RUF001 (marks of other scripts are meant)
from smalti.evals.graders.ifeval.languages import possible_languages
from smalti.evals.graders.ifeval.segments import (
    WORD_CHARACTER,
    capital_words,
    official_capital_words,
    paragraphs,
)
from smalti.evals.graders.ifeval.verdict import Verdict, meets

_QUOTES = "\"'“”‘’„«»"
_MIN_WORDS_OF_A_LANGUAGE = 8


def _official_matches(pattern: str, response: str) -> int | None:
    """Count the matches of a keyword that the published checkers use as a regular expression; None if it is not one."""
    try:
        return len(re.findall(pattern, response, flags=re.IGNORECASE))
    except re.error:
        return None


def _occurrences(phrase: str, response: str) -> int:
    """Count ``phrase`` as whole words, in any case, with any white space between them."""
    words = r"\s+".join(map(re.escape, phrase.split()))
    return len(re.findall(rf"(?<!{WORD_CHARACTER}){words}(?!{WORD_CHARACTER})", response, flags=re.IGNORECASE))


def existence(response: str, *, keywords: list[str]) -> Verdict:
    """All keywords occur, in any case.

    Official: each as a regular expression, anywhere, so "le" is in "apple" and "a.b" in "axb". Fixed: as whole words.
    """
    official = all(_official_matches(keyword, response) for keyword in keywords)
    return Verdict(official, all(_occurrences(keyword, response) for keyword in keywords))


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> Verdict:
    """A keyword occurs at least, or less than, ``frequency`` times, in any case.

    Official: matches of a regular expression, so "war" counts in "reward". Fixed: whole words.
    """
    matches = _official_matches(keyword.strip(), response)
    official = matches is not None and meets(matches, relation, frequency)
    return Verdict(official, meets(_occurrences(keyword, response), relation, frequency))


def forbidden_words(response: str, *, forbidden_words: list[str]) -> Verdict:
    r"""None of the words occurs, in any case.

    Official: as a regular expression between ``\b``, which matches inside words of Indic scripts and never around a
    word that begins or ends with punctuation, such as "c#". Fixed: as whole words.
    """
    official = all(_official_matches(rf"\b{word}\b", response) == 0 for word in forbidden_words)
    return Verdict(official, not any(_occurrences(word, response) for word in forbidden_words))


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> Verdict:
    """A letter occurs at least, or less than, ``let_frequency`` times, in any case.

    No difference here. The published checker replaces what is not one of a to z ("#" and "!" in two rows of the
    published data) by a random letter, drawn anew for each response: there is no such verdict to reproduce, and both
    count the named character.
    """
    follows = meets(response.lower().count(letter.lower()), let_relation, let_frequency)
    return Verdict(follows, follows)


def _language_verdict(response: str, language: str) -> Verdict:
    languages = possible_languages(response)
    long = [part for part in paragraphs(response) if len(part.split()) >= _MIN_WORDS_OF_A_LANGUAGE]
    others = any(possible and language not in possible for possible in map(possible_languages, long))
    return Verdict(not languages or language in languages, language in languages and not others)


def response_language(response: str, *, language: str) -> Verdict:
    """The entire response is in one language.

    Official: the language of the whole is the right one; a text without letters passes. Fixed: no paragraph of eight or
    more words is in another language either; a text without letters fails. Both use ``possible_languages``, since the
    published checker's detector is random: a text whose words decide nothing passes if its script fits.
    """
    return _language_verdict(response, language)


def english_capital(response: str) -> Verdict:
    """The response is in English, without a lowercase letter.

    The language as in ``response_language``. Published verdicts on text in capitals are less sure than these: its
    detector knows lowercase text (sieval#104).
    """
    official, fixed = _language_verdict(response, "en")
    return Verdict(response.isupper() and official, response.isupper() and fixed)


def english_lowercase(response: str) -> Verdict:
    """The response is in English, without a capital letter. The language as in ``response_language``."""
    official, fixed = _language_verdict(response, "en")
    return Verdict(response.islower() and official, response.islower() and fixed)


def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> Verdict:
    """Words in capital letters occur at least, or less than, ``capital_frequency`` times.

    Official: tokens of nltk without a lowercase letter: "I" and "A" count, "DON'T" counts twice, "R&D" too. Fixed:
    words of at least two letters, once each, since "I" is written so in any sentence.
    """
    official = meets(official_capital_words(response), capital_relation, capital_frequency)
    return Verdict(official, meets(capital_words(response), capital_relation, capital_frequency))


def no_comma(response: str) -> Verdict:
    """No comma. Official: no ASCII comma. Fixed: also no fullwidth, ideographic or Arabic comma."""
    return Verdict("," not in response, not re.search("[,\uff0c、،\ufe50\ufe51\uff64]", response))


def quotation(response: str) -> Verdict:
    """The response is wrapped in double quotation marks.

    Official: its first and last characters are ASCII quotes; a pair without content passes. Fixed: curly ones are right
    too, and there is content.
    """
    text = response.strip()
    official = len(text) > 1 and text[0] == text[-1] == '"'
    wrapped = official or (text[0] in "“„" and text[-1] in "”“")
    return Verdict(official, len(text) > 2 and wrapped and bool(text[1:-1].strip(_QUOTES + " \n\t")))


def end_checker(response: str, *, end_phrase: str) -> Verdict:
    """The response ends with exactly this phrase; the quotes that may wrap a response are ignored.

    Official: in any case, also as the end of a longer word, and only ASCII double quotes are ignored. Fixed: the phrase
    as it is written (unless the whole response is in one case, which another instruction may ask for), as whole words.
    """
    phrase = end_phrase.strip()
    official = response.strip().strip('"').lower().endswith(phrase.lower())
    text = response.strip().rstrip(_QUOTES).rstrip()
    exact = phrase.rstrip(_QUOTES) or phrase
    if text in (text.upper(), text.lower()):
        text, exact = text.lower(), exact.lower()
    before = text[: -len(exact)][-1:]
    return Verdict(official, text.endswith(exact) and not (before.isalnum() and exact[0].isalnum()))
