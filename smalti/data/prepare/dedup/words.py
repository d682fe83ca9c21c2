"""The words of a text, as they are compared: an expression for Daft, run in its Rust.

In this order, after licence comments at the head of source files are left out (``licence``): lower case (Unicode);
characters that nobody sees (zero-width ones, soft hyphens, marks of direction: Unicode's Cf and default ignorable) are
taken out; each character of a script that is written without blanks (Han, Hiragana, Katakana) is a word of its own, and
in Thai, Lao, Khmer and Myanmar each consonant with the vowels and marks about it; everything that is neither letter,
mark, digit nor underscore separates words. So punctuation, layout and case never make two texts differ.
"""

from typing import Any

_UNSEEN = r"[\p{Cf}\p{Default_Ignorable_Code_Point}]+"

# Single letters of these alphabets are too few: all long texts would share most runs of three.
_VOWEL_BEFORE = r"[\x{E40}-\x{E44}\x{EC0}-\x{EC4}]?"
_VOWEL_BEHIND = r"[\x{E30}\x{E32}\x{E33}\x{E45}\x{EB0}\x{EB2}\x{EB3}\x{EBD}]?"
_BELOW = r"(?:[\x{1039}\x{17D2}][\p{Khmer}\p{Myanmar}]\p{M}*)*"
_SYLLABLE = rf"{_VOWEL_BEFORE}[\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}]\p{{M}}*{_BELOW}{_VOWEL_BEHIND}"

_WITHOUT_BLANKS = rf"([\p{{Han}}\p{{Hiragana}}\p{{Katakana}}]|{_SYLLABLE})"


def words_of(text: Any, functions: Any) -> Any:
    """The words of the column ``text`` with single blanks between them; ``functions`` are Daft's."""
    words = functions.regexp_replace(functions.lower(text), _UNSEEN, "")
    words = functions.regexp_replace(words, _WITHOUT_BLANKS, " $1 ")
    words = functions.regexp_replace(words, r"[^\w]+", " ")
    return functions.lstrip(functions.rstrip(words))
