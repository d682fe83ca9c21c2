"""The default preset of ``smalti data build``: removes what is no prose in any language, and repeated passages.

It counts characters and not words, so that it works for languages without blanks.
"""

import re
import zlib

from smalti.data.prepare.curate.rules.measure import Text, frac, repeated_line_characters_frac
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_BLOCK = 400
_LEAST = 60
_COMPRESSED_FRAC = 0.2
"""Prose in blocks of 400 characters compresses to 0.5 to 0.65 of its bytes, a line repeated ten times to 0.15."""
_MARKUP = re.compile(r"<[A-Za-z/!][^<>]{0,300}>|\b(?:function|var|const|let)\b[^\n]{0,80}[{;]|[{};]\s*$", re.MULTILINE)


def _letters(text: Text) -> float:
    """Count letters; a character of Han, kana or Hangul is worth three of them."""
    return text.characters.letters + 2 * text.characters.wide


def _letter_frac(text: Text) -> float:
    """Return the share of letters and their marks (vowel signs) among visible characters."""
    return frac(text.characters.visible_words, text.characters.visible)


def _markup_frac(text: Text) -> float:
    return frac(sum(len(match[0]) for match in _MARKUP.finditer(text.text)), len(text.text))


def _repetitive_frac(text: Text) -> float:
    """Return the share of characters in blocks of 400 that compress to less than a fifth."""
    repetitive = 0
    for start in range(0, len(text.text), _BLOCK):
        block = text.text[start : start + _BLOCK]
        data = block.encode()
        if len(block) >= _LEAST and len(zlib.compress(data, 6)) - 11 < _COMPRESSED_FRAC * len(data):
            repetitive += len(block)
    return frac(repetitive, len(text.text))


SAFE = Preset(
    "safe",
    "ours, for prose in any language",
    (
        Rule("letters", "letters, of which those of Han, kana and Hangul count three times", _letters, low=20),
        Rule("letter-frac", "share of letters in what is visible", _letter_frac, low=0.6),
        Rule("markup-frac", "share of characters in tags and code", _markup_frac, high=0.2),
        Rule("repetitive-frac", "share of characters in passages that repeat themselves", _repetitive_frac, high=0.15),
        Rule(
            "repeated-line-characters",
            "share of characters in lines seen before",
            repeated_line_characters_frac,
            high=0.3,
        ),
    ),
)
