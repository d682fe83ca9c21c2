"""The words of a text that are compared, as an expression for Daft; see ``words_of``.

Texts that differ only in punctuation, layout or case have equal words.
"""

from typing import Any

_INVISIBLE = r"[\p{Cf}\p{Default_Ignorable_Code_Point}]+"

# These alphabets have too few letters for words of one letter: all long texts would share most runs of three.
_VOWEL_BEFORE = r"[\x{E40}-\x{E44}\x{EC0}-\x{EC4}]?"
_VOWEL_BEHIND = r"[\x{E30}\x{E32}\x{E33}\x{E45}\x{EB0}\x{EB2}\x{EB3}\x{EBD}]?"
_BELOW = r"(?:[\x{1039}\x{17D2}][\p{Khmer}\p{Myanmar}]\p{M}*)*"
_SYLLABLE = rf"{_VOWEL_BEFORE}[\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}]\p{{M}}*{_BELOW}{_VOWEL_BEHIND}"

_WITHOUT_BLANKS = rf"([\p{{Han}}\p{{Hiragana}}\p{{Katakana}}]|{_SYLLABLE})"


def words_of(text: Any, functions: Any) -> Any:
    """Return the words of the column ``text``, joined by single blanks; ``functions`` are Daft's.

    In this order, after licence comments are removed (``licence``): lower case (Unicode); invisible characters
    (zero-width ones, soft hyphens, direction marks: Unicode's Cf and default ignorable) are removed; each character of
    Han, Hiragana and Katakana, which are written without blanks, is a word, and in Thai, Lao, Khmer and Myanmar each
    consonant with its vowels and marks; everything but letters, marks, digits and underscores separates words.
    """
    words = functions.regexp_replace(functions.lower(text), _INVISIBLE, "")
    words = functions.regexp_replace(words, _WITHOUT_BLANKS, " $1 ")
    words = functions.regexp_replace(words, r"[^\w]+", " ")
    return functions.lstrip(functions.rstrip(words))
