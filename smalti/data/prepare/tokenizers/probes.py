"""How a tokenizer splits numbers and indentation, and which short texts it does not give back, on fixed texts."""

from collections.abc import Sequence
from typing import Any

from smalti.base.rng import derive_key
from smalti.data.tokenizer.encode import Tokenizer

NUMBERS = ("1234567", "2026", "3.14159")
"""Numbers whose pieces are shown."""
INDENTS = (2, 4, 8, 16)
"""Blanks before a word at the beginning of a line."""

_LONGEST_NUMBER = 8
_OF_EACH_LENGTH = 16
_LONGEST_RUN = 128
_TEXTS = {
    "two blanks": "a  b", "a tab": "a\tb", "CRLF": "a\r\nb", "a first blank": " a", "a last newline": "a\n",
    "capitals": "Ab", "accents": "é e\u0301", "full-width letters": "\uff21\uff22", "an emoji": "👩🏽\u200d💻",
    "a zero byte": "a\0b",
}  # fmt: skip


def probe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what is known of a tokenizer without documents.

    ``digits`` describes the rule for numbers of 1 to 8 digits; ``tokens_per_digit`` is the mean over them, each length
    counted alike. ``indent_tokens`` and ``tab_tokens``: tokens that so many blanks or tabs add at the beginning of a
    line. ``longest_blank_run``: the most blanks, up to 128, that are one token. ``changed``: which of the fixed texts
    decode to another text.
    """
    numbers = [_number(length, index) for length in range(1, _LONGEST_NUMBER + 1) for index in range(_OF_EACH_LENGTH)]
    sizes = [[len(piece) for piece in pieces] for pieces in _pieces(tokenizer, numbers)]
    return {
        "digits": digit_rule(sizes),
        "tokens_per_digit": sum(len(each) / sum(each) for each in sizes) / len(sizes),
        "pieces": dict(zip(NUMBERS, _pieces(tokenizer, NUMBERS), strict=True)),
        "indent_tokens": {n: _added(tokenizer, " " * n) for n in INDENTS},
        "tab_tokens": {n: _added(tokenizer, "\t" * n) for n in (1, 2, 4)},
        "longest_blank_run": max((n for n in range(1, _LONGEST_RUN + 1) if _is_token(tokenizer, " " * n)), default=0),
        "changed": [name for name, text in _TEXTS.items() if not is_exact(tokenizer, text, tokenizer.encode(text))],
    }


def digit_rule(sizes: Sequence[Sequence[int]]) -> str:
    """Describe the rule by which numbers are split, from the digits of each piece of each number."""
    longest = max(max(each) for each in sizes)
    if longest == 1:
        return "each digit"
    if all(size == longest for each in sizes for size in each[:-1]):
        return f"groups of {longest} from the left"
    if all(size == longest for each in sizes for size in each[1:]):
        return f"groups of {longest} from the right"
    return f"learned pieces of up to {longest}"


def is_exact(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> bool:
    """Whether ``ids`` decode to ``text``."""
    return tokenizer.decode(ids, skip_special=False) == text


def _number(length: int, index: int) -> str:
    key = derive_key("digits", length, index)
    return str(10 ** (length - 1) + key % (9 * 10 ** (length - 1)))


def _pieces(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[str]]:
    """Return the pieces of each text. Tokens without characters of their own (marks of words) are left out."""
    located = tokenizer.encode_located(texts)
    return [
        [text[begin:end] for begin, end in spans if end > begin]
        for text, (_, spans) in zip(texts, located, strict=True)
    ]


def _added(tokenizer: Tokenizer, blanks: str) -> int:
    return len(tokenizer.encode(f"a\n{blanks}b")) - len(tokenizer.encode("a\nb"))


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    return len(tokenizer.encode(text)) == 1
