r"""Counts the tokens ``\w+(?:['’\-]\w+)*|[^\w\s]`` of a text in numpy, without making them."""  # noqa: RUF002

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smalti.data.documents.characters import codes

_SYMBOL, _JOINER, _DIGIT, _LETTER = 1, 2, 3, 4
"""Kinds of characters; 0 is white space. Word characters are those from ``_DIGIT`` on."""


class TokenCounts(NamedTuple):
    """Numbers of tokens."""

    tokens: int
    words: int
    """Tokens that are not a symbol."""
    word_characters: int
    alphabetic_words: int
    """Words with a letter."""


def count_tokens(text: str) -> TokenCounts:
    """Count the tokens of ``text``."""
    kinds = _kinds()[codes(text)]
    is_word = kinds >= _DIGIT
    is_joiner = kinds == _JOINER
    n_symbols = int(np.count_nonzero(kinds == _SYMBOL) + np.count_nonzero(is_joiner))
    if n_symbols:
        joined = is_joiner[1:-1] & is_word[:-2] & is_word[2:]
        n_symbols -= int(np.count_nonzero(joined))
        is_word[1:-1] |= joined
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1]
    starts = np.flatnonzero(is_start)
    n_alphabetic = np.count_nonzero(np.maximum.reduceat(kinds, starts) == _LETTER) if len(starts) else 0
    return TokenCounts(n_symbols + len(starts), len(starts), int(np.count_nonzero(is_word)), int(n_alphabetic))


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    characters = [chr(code) for code in range(0x110000)]
    kinds = np.full(len(characters), _SYMBOL, np.uint8)
    kinds[np.fromiter(map(str.isspace, characters), bool)] = 0
    kinds[np.fromiter(map(str.isalnum, characters), bool)] = _DIGIT
    kinds[np.fromiter(map(str.isalpha, characters), bool)] = _LETTER
    kinds[ord("_")] = _DIGIT
    kinds[[ord(joiner) for joiner in "'’-"]] = _JOINER  # noqa: RUF001
    return kinds
