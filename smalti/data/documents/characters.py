"""Counts the characters of a text by class, in numpy: a hundred times as fast as a loop over characters."""

import re
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SCRIPTS = {
    "latin": r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
    "cyrillic": r"\u0400-\u04ff",
    "kana": r"\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "han": r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "hangul": r"\uac00-\ud7a3\u1100-\u11ff",
    "greek": r"\u0370-\u03ff\u1f00-\u1fff",
    "hebrew": r"\u05d0-\u05ea",
    "arabic": r"\u0621-\u064a\u0660-\u06ff",
    "devanagari": r"\u0900-\u097f",
    "thai": r"\u0e01-\u0e5b",
}
"""Script -> its characters, as in a class of a regular expression."""

_ALPHA, _SPACE, _ASCII, _WIDE, _NUMERIC = 1, 2, 4, 8, 16
_WIDE_CLASS = r"\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"


class Characters(NamedTuple):
    """Numbers of characters."""

    letters: int
    """By ``str.isalpha``."""
    wide: int
    """Of Han, kana and Hangul."""
    visible: int
    """Not white space."""
    visible_words: int
    """Letters, and all visible characters outside of ASCII."""
    word_letters: int
    r"""Word characters but decimal digits and ``_``: ``[^\W\d_]``."""


def count(text: str) -> Characters:
    """Count the characters of ``text``."""
    counts = np.bincount(_classes()[codes(text)], minlength=32).tolist()

    def total(has: int, lacks: int = 0) -> int:
        return sum(n for kind, n in enumerate(counts) if kind & has == has and not kind & lacks)

    letters = total(_ALPHA)
    visible_words = total(0, _SPACE | _ASCII) + total(_ALPHA | _ASCII, _SPACE)
    return Characters(letters, total(_WIDE), total(0, _SPACE), visible_words, letters + total(_NUMERIC))


def count_scripts(text: str) -> dict[str, int]:
    """Return script -> number of its characters, in the order of SCRIPTS."""
    counts = np.bincount(_scripts()[codes(text)], minlength=len(SCRIPTS) + 1)
    return dict(zip(SCRIPTS, counts[1:].tolist(), strict=True))


def codes(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of ``text``; the array cannot be changed."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def letters_only(text: str) -> str:
    r"""Return ``text`` with a blank for each character but ``[^\W\d_]`` and apostrophes, which all become straight."""
    return _letters()[codes(text)].tobytes().decode("utf-32-le")


@cache
def _classes() -> npt.NDArray[np.uint8]:
    characters = [chr(code) for code in range(0x110000)]
    classes = np.zeros(len(characters), np.uint8)
    classes[np.fromiter(map(str.isalpha, characters), bool)] |= _ALPHA
    classes[np.fromiter(map(str.isspace, characters), bool)] |= _SPACE
    classes[:128] |= _ASCII
    _mark(classes, _WIDE_CLASS, _WIDE)
    # Numbers that are no decimal digits, such as the Roman ones, are word characters.
    is_word = np.fromiter(map(str.isalnum, characters), bool) & ~np.fromiter(map(str.isdecimal, characters), bool)
    classes[is_word & (classes & _ALPHA == 0)] |= _NUMERIC
    return classes


@cache
def _letters() -> npt.NDArray[np.uint32]:
    """Return code point -> the same for a letter, else that of a blank."""
    letters = np.arange(0x110000, dtype=np.uint32)
    letters[_classes() & (_ALPHA | _NUMERIC) == 0] = ord(" ")
    letters[[ord("'"), ord("’")]] = ord("'")  # noqa: RUF001
    return letters


@cache
def _scripts() -> npt.NDArray[np.uint8]:
    scripts = np.zeros(0x110000, np.uint8)
    for number, characters in enumerate(SCRIPTS.values(), 1):
        _mark(scripts, characters, number)
    return scripts


def _mark(table: npt.NDArray[np.uint8], characters: str, value: int) -> None:
    """Add ``value`` to the entries of a class of characters without escapes but of code points."""
    plain = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), characters)
    for first, last in re.findall("(.)-(.)", plain, re.DOTALL):
        table[ord(first) : ord(last) + 1] |= value
