"""From tokens to text that may be shown: whole characters only, and nothing of a stop text.

Promises: pieces joined are the decoded answer; no piece ends inside a UTF-8 character. Bytes that are no UTF-8 come out
as U+FFFD once that is certain (a lossy decoder shows an unfinished character as one U+FFFD at the very end).
"""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_ANCHOR_TOKENS = 4


class Decodes(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 as U+FFFD."""


class TextDecoder:
    """Text of one answer, token by token.

    ``context`` are the tokens before the answer. Tokens are decoded together with a few before them, because some
    tokenizers drop the space at the head of what they decode.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(context[-_ANCHOR_TOKENS:])
        self._pending: list[int] = []
        self._shown = len(tokenizer.decode(self._anchor))

    def add(self, token: int) -> str:
        """The text that has become certain with ``token``."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._anchor + self._pending)
        if text.endswith(_REPLACEMENT):
            piece = text[self._shown : -1]
            self._shown = max(self._shown, len(text) - 1)
            return piece
        piece = text[self._shown :]
        self._anchor = (self._anchor + self._pending)[-_ANCHOR_TOKENS:]
        self._pending = []
        self._shown = len(self._tokenizer.decode(self._anchor))
        return piece

    def flush(self) -> str:
        """What is left when no token follows: at most one U+FFFD, for a character that was never finished."""
        text = self._tokenizer.decode(self._anchor + self._pending) if self._pending else ""
        self._pending = []
        return text[self._shown :]


class StopText:
    """Passes text on up to the first stop text; holds back what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What may be shown after ``text`` came; nothing once a stop text was found."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop`` (shorter than all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
