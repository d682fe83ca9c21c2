"""Log-probabilities of tokens in OpenAI's two shapes.

Promises: a token is reported once the text that it belongs to is shown, and never when a stop text swallowed it.
"""

from collections.abc import Iterable
from typing import Any

from smalti.data.tokenizer.encode import StreamDecoder, Tokenizer
from smalti.serve.engine.sequence import TokenScore

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write (OpenAI's number)."""

Placed = tuple[TokenScore, int]
"""A token and the place in the answer's text where it begins."""


class ScoreRow:
    """The tokens of one answer, each with the place of its text; hands out those whose text is shown."""

    def __init__(self, tokenizer: Tokenizer, stream: StreamDecoder) -> None:
        """``stream`` has seen what stands before the answer."""
        self._tokenizer = tokenizer
        self._stream = stream
        self._place = 0
        self._held: list[Placed] = []

    def prompt(self, tokens: Iterable[TokenScore], text: str) -> list[Placed]:
        """Tokens that are echoed as ``text``: all of them at once."""
        placed, stream, place = [], self._tokenizer.decode_stream(), 0
        for token in tokens:
            placed.append((token, min(place, len(text))))
            special = token.id in self._tokenizer.special_ids
            place += len(token_text(self._tokenizer, token.id) if special else stream.push(token.id))
        self._place = len(text)
        return placed

    def add(self, tokens: Iterable[TokenScore]) -> None:
        """Tokens that were generated."""
        for token in tokens:
            self._held.append((token, self._place))
            self._place += len(self._stream.push(token.id))

    def take(self, shown: int, *, rest: bool = False) -> list[Placed]:
        """Those that begin within the first ``shown`` characters; ``rest``: all that are left."""
        taken = [one for one in self._held if rest or one[1] < shown]
        self._held = self._held[len(taken) :]
        return taken


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What an id stands for; for tokenizers without bytes of their own, its text alone."""
    from smalti.base.errors import UserError

    try:
        return tokenizer.token_bytes(token)
    except UserError:
        return tokenizer.decode([token], skip_special=False).encode()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token alone; a part of a character is written as its bytes, as OpenAI does."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_shape(placed: list[Placed], tokenizer: Tokenizer) -> dict[str, Any]:
    """``logprobs`` of ``/v1/completions``: four lists of equal length."""
    return {
        "tokens": [token_text(tokenizer, token.id) for token, _ in placed],
        "token_logprobs": [_finite(token.logprob) for token, _ in placed],
        "top_logprobs": [_tops(token, tokenizer) for token, _ in placed],
        "text_offset": [place for _, place in placed],
    }


def chat_shape(placed: list[Placed], tokenizer: Tokenizer) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": token_text(tokenizer, token), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**one(token.id, token.logprob), "top_logprobs": [one(*top) for top in token.top]} for token, _ in placed
    ]
    return {"content": content, "refusal": None}


def _tops(token: TokenScore, tokenizer: Tokenizer) -> dict[str, float | None] | None:
    """The likeliest tokens by their text, and the chosen one, which need not be among them."""
    if token.logprob is None:
        return None
    named: dict[str, float | None] = {}
    for other, logprob in (*token.top, (token.id, token.logprob)):
        named.setdefault(token_text(tokenizer, other), _finite(logprob))  # of two with one text, the likelier
    return named


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
