"""Answers in the format of OpenAI's API: whole, and in chunks."""

import secrets
from typing import Any

from smalti import __version__
from smalti.base.clock import wall_s
from smalti.data.tokenizer.encode import Tokenizer
from smalti.serve.server.choices import Delta
from smalti.serve.server.scores import chat_shape, completion_shape


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class CompletionShape:
    """``text_completion`` objects; a chunk has the same format as a whole answer."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, scored: bool) -> None:
        self._tokenizer = tokenizer
        self._scored = scored
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(wall_s()),
            "model": model,
            "system_fingerprint": f"smalti-{__version__}",
        }

    def whole(self, choices: list[Delta], used: dict[str, int]) -> dict[str, Any]:
        """Return the answer in one object."""
        return {"object": self.kind, **self._head, "choices": [self.choice(delta) for delta in choices], "usage": used}

    def chunk(self, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return {"object": self.chunk_kind, **self._head, "choices": choices, "usage": used}

    def first(self, n_choices: int) -> list[dict[str, Any]]:
        """Return the choices of the chunks that precede all text."""
        return []

    def choice(self, delta: Delta) -> dict[str, Any]:
        """Return a whole choice."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_shape(delta.tokens, self._tokenizer) if self._scored else None,
            "finish_reason": delta.finish_reason,
        }

    def part(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""
        return self.choice(delta)


class ChatShape(CompletionShape):
    """``chat.completion`` objects, and their chunks with a ``delta``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self, n_choices: int) -> list[dict[str, Any]]:
        """Return the choices that give the role."""
        opening = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": i, "delta": opening, "logprobs": None, "finish_reason": None} for i in range(n_choices)]

    def choice(self, delta: Delta) -> dict[str, Any]:
        """Return a whole choice."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {**self._of(delta), "message": message}

    def part(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""
        return {**self._of(delta), "delta": {"content": delta.text} if delta.text else {}}

    def _of(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "logprobs": chat_shape(delta.tokens, self._tokenizer) if self._scored else None,
            "finish_reason": delta.finish_reason,
        }
