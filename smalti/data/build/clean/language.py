"""Identifies the language of a text by its script and by function words; without a model and without a download.

The score is the confidence, from 0 to 1: the share of letters in the script of the language, times, in Latin and
Cyrillic, the share of its function words among those of all languages of that script, sharpened by a cube. ``und`` (ISO
639-2: undetermined) has the score 0: too few letters, or function words of none of the languages.
"""

import re
from collections import Counter

from smalti.data.build.clean.function_words import WEIGHTS, WORDS
from smalti.data.documents.characters import count, count_scripts, letters_only

UNDETERMINED = "und"
WITHOUT_BLANKS = frozenset({"ja", "zh", "th", "km", "lo", "my"})
"""Languages that are written without blanks between words: rules that count words do not apply."""

_LANGUAGE_OF = {"hangul": "ko", "greek": "el", "hebrew": "he", "devanagari": "hi", "thai": "th"}
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_PERSIAN = re.compile("[پچژگکی]")

_SAMPLE_CHARACTERS = 20_000
_MIN_LETTERS = 6
_MIN_KANA_FRAC = 0.05
_MIN_FUNCTION_WORDS = 2
_MIN_COVERAGE = 0.1
"""Of running prose in one of the languages a quarter to a half are function words of the list."""


def identify(text: str) -> tuple[str, float]:
    """Return the language (ISO 639-1, or ``und``) of most of ``text``, and the confidence."""
    piece = sample(text)
    counts, n_letters = count_scripts(piece), count(piece).word_letters
    if n_letters < _MIN_LETTERS:
        return UNDETERMINED, 0.0
    east_asian = counts.pop("kana") + counts["han"]
    kana = east_asian - counts.pop("han")
    script = max(counts, key=counts.__getitem__)
    # A character of Han or kana says about as much as three letters.
    if 3 * east_asian > counts[script]:
        language = "ja" if kana >= _MIN_KANA_FRAC * east_asian else "zh"
        return language, _frac(3 * east_asian, 3 * east_asian + n_letters - east_asian)
    share = _frac(counts[script], n_letters + 2 * east_asian)
    if script in _LANGUAGE_OF:
        return _LANGUAGE_OF[script], share
    if script == "arabic":
        is_persian = len(_PERSIAN.findall(piece)) > 0.03 * counts[script]
        return ("fa" if is_persian else "ar"), share
    language, confidence = _by_words(piece)
    return language, share * confidence


def _by_words(piece: str) -> tuple[str, float]:
    evidence: Counter[str] = Counter()
    tokens = Counter(_words(piece))
    for token in [token for token in tokens if token in WEIGHTS or "'" in token]:
        weights = WEIGHTS.get(token)
        if weights is None:  # d'un and l'homme are two words of which the first says nothing
            weights = WEIGHTS.get(token.partition("'")[2])
        for language, weight in weights.items() if weights else ():
            evidence[language] += weight * tokens[token]  # type: ignore[assignment]
    if not evidence:
        return UNDETERMINED, 0.0
    language = max(sorted(evidence), key=evidence.__getitem__)
    matched = sum(map(tokens.__getitem__, WORDS[language] & tokens.keys()))
    if matched < _MIN_FUNCTION_WORDS or matched < _MIN_COVERAGE * tokens.total():
        return UNDETERMINED, 0.0
    return language, evidence[language] ** 3 / sum(value**3 for value in evidence.values())


def _words(piece: str) -> list[str]:
    """Return the words of letters, also such as ``don't``, in lower case."""
    letters = letters_only(piece)
    if "İ" in letters:  # its small letter is two characters, of which one is no letter
        return [word.lower() for word in _TOKEN.findall(letters)]
    words = letters.lower().split()
    if "'" not in letters:
        return words
    return [part for word in words for part in (_TOKEN.findall(word) if "'" in word else (word,))]


def sample(text: str) -> str:
    """Return the beginning, the middle and the end of a long text."""
    if len(text) <= _SAMPLE_CHARACTERS:
        return text
    third = _SAMPLE_CHARACTERS // 3
    middle = (len(text) - third) // 2
    return "\n".join((text[:third], text[middle : middle + third], text[-third:]))


def _frac(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0
