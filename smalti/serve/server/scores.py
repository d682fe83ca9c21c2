"""Log-probabilities of tokens in OpenAI's two formats.

A token is reported once its text is shown, and never when it is part of a stop text.
"""

from collections.abc import Iterable
from typing import Any

from smalti.data.tokenizer.encode import StreamDecoder, Tokenizer
from smalti.serve.engine.request import TokenScore

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON has no number for (OpenAI's choice)."""

Placed = tuple[TokenScore, int]
"""A token and the offset in the answer's text at which it starts."""


class ScoreRow:
    """The tokens of one answer with the offsets of their texts; returns those whose text is shown."""

    def __init__(self, tokenizer: Tokenizer, stream: StreamDecoder) -> None:
        """``stream`` has decoded the text before the answer."""
        self._tokenizer = tokenizer
        self._stream = stream
        self._offset = 0
        self._held: list[Placed] = []

    def prompt(self, tokens: Iterable[TokenScore], text: str) -> list[Placed]:
        """Return the tokens of the prompt that is echoed as ``text``."""
        placed: list[Placed] = []
        stream = self._tokenizer.decode_stream()
        offset = 0
        for token in tokens:
            placed.append((token, min(offset, len(text))))
            special = token.id in self._tokenizer.special_ids
            offset += len(token_text(self._tokenizer, token.id) if special else stream.push(token.id))
        self._offset = len(text)
        return placed

    def add(self, tokens: Iterable[TokenScore]) -> None:
        """Add generated tokens."""
        for token in tokens:
            self._held.append((token, self._offset))
            self._offset += len(self._stream.push(token.id))

    def take(self, shown: int, *, rest: bool = False) -> list[Placed]:
        """Return the tokens that start within the first ``shown`` characters; ``rest``: all that are left."""
        taken = [placed for placed in self._held if rest or placed[1] < shown]
        self._held = self._held[len(taken) :]
        return taken


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of an id; for a tokenizer without bytes, those of its text."""
    from smalti.base.errors import UserError

    try:
        return tokenizer.token_bytes(token)
    except UserError:
        return tokenizer.decode([token], skip_special=False).encode()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; a part of a character is written as its bytes, as OpenAI does."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_shape(placed: list[Placed], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``logprobs`` of ``/v1/completions``: four lists of equal length."""
    return {
        "tokens": [token_text(tokenizer, token.id) for token, _ in placed],
        "token_logprobs": [_finite(token.logprob) for token, _ in placed],
        "top_logprobs": [_tops(token, tokenizer) for token, _ in placed],
        "text_offset": [offset for _, offset in placed],
    }


def chat_shape(placed: list[Placed], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``logprobs`` of ``/v1/chat/completions``."""

    def scored(token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": token_text(tokenizer, token), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**scored(token.id, token.logprob), "top_logprobs": [scored(*top) for top in token.top]} for token, _ in placed
    ]
    return {"content": content, "refusal": None}


def _tops(token: TokenScore, tokenizer: Tokenizer) -> dict[str, float | None] | None:
    """Return logprobs by text: of the likeliest tokens, and of the sampled one, which need not be among them."""
    if token.logprob is None:
        return None
    logprobs: dict[str, float | None] = {}
    for other, logprob in (*token.top, (token.id, token.logprob)):
        logprobs.setdefault(token_text(tokenizer, other), _finite(logprob))  # of two with one text, the likelier
    return logprobs


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
