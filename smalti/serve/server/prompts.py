"""Turns prompts, as clients send them, into tokens for the engine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smalti.data.tokenizer.chat import ChatFormat, Message
from smalti.serve.engine.engine import Engine
from smalti.serve.server.errors import ApiError


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and which of them the client wrote."""

    ids: tuple[int, ...]
    text: str
    """The text that ``echo`` shows."""
    added: int
    """Tokens at the start that the client did not write (the begin token)."""


def n_prompts(value: Any) -> int:
    """Return how many prompts a request has, without a check of each."""
    return len(value) if isinstance(value, list) and value and not _is_id(value[0]) else 1


def read_prompt(value: Any, limit_tokens: int) -> list[str | list[int]]:
    """Return the prompts of a text, a list of ids, or a list of either. Raises ApiError for anything else."""
    if isinstance(value, str):
        return [value]
    if value is None:
        return [""]
    if isinstance(value, list) and value:
        for ids in value if isinstance(value[0], list) else [value] if _is_id(value[0]) else []:
            if isinstance(ids, list) and len(ids) > limit_tokens:
                raise _too_long(f"{len(ids)}", limit_tokens, "prompt")
        if all(_is_id(token) for token in value):
            return [value]
        if all(isinstance(text, str) for text in value):
            return list(value)
        if all(isinstance(ids, list) and ids and all(_is_id(token) for token in ids) for ids in value):
            return list(value)
    raise ApiError(
        400,
        f"'prompt' is {_kind(value)}; it must be a text, a list of texts, a list of token ids, or a list of such lists",
        param="prompt",
        code="invalid_value",
    )


def to_tokens(prompt: str | list[int], engine: Engine, *, answered: bool) -> Prompt:
    """Tokenize a text, with the begin token before it; take ids as they are. Raises ApiError where they do not fit.

    ``answered``: leave space for at least one token; else the prompt is only scored, and may fill the context.
    """
    longest = engine.limit_tokens - answered
    if isinstance(prompt, str):
        ids = [engine.begin_id, *BoundedEncoder(engine, "prompt").encode(prompt)]
        tokens = Prompt(tuple(ids), prompt, 1)
    else:
        unused = engine.tokenizer.unused_ids
        outside = next(
            (token for token in prompt if not 0 <= token < engine.tokenizer.vocab_size or token in unused), None
        )
        if outside is not None:
            shown = str(outside) if -(10**20) < outside < 10**20 else "a number of many digits"
            raise ApiError(
                400,
                f"'prompt' holds the token id {shown}, which the model does not have (0 to "
                f"{engine.tokenizer.vocab_size - 1})",
                param="prompt",
                code="invalid_value",
            )
        tokens = Prompt(tuple(prompt), engine.tokenizer.decode(prompt, skip_special=False), 0)
    if len(tokens.ids) > longest:
        raise _too_long(f"{len(tokens.ids)}", engine.limit_tokens, "prompt")
    return tokens


def chat_to_tokens(messages: Sequence[Message], chat: ChatFormat, engine: Engine) -> Prompt:
    """Render a conversation in the model's chat format. Raises ApiError where it does not fit."""
    ids = chat.prompt_ids(messages, BoundedEncoder(engine, "messages"), engine.begin_id)
    if not ids:
        raise ApiError(400, "these messages make an empty prompt", param="messages", code="invalid_value")
    if len(ids) >= engine.limit_tokens:
        raise _too_long(f"{len(ids)}", engine.limit_tokens, "messages")
    return Prompt(tuple(ids), "", 0)


class BoundedEncoder:
    """The engine's tokenizer for the texts of one prompt; refuses, before encoding, texts that cannot fit the context.

    Encoding holds Python's lock: encoding megabytes only to refuse them would stall every request.
    """

    def __init__(self, engine: Engine, param: str) -> None:
        self._tokenizer = engine.tokenizer
        self._limit_tokens = engine.limit_tokens
        self._param = param
        self._bytes = 0
        self.special_ids = engine.tokenizer.special_ids
        self.token_bytes = engine.tokenizer.token_bytes

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text. Raises ApiError where the bytes so far are more than the tokens of a full context can have."""
        self._bytes += len(text.encode("utf-8", "replace"))
        if self._bytes > self._limit_tokens * self._tokenizer.most_token_bytes:
            raise _too_long(f"{self._bytes} bytes, far more", self._limit_tokens, self._param)
        return self._tokenizer.encode(text, special=special)


def _too_long(what: str, limit_tokens: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {limit_tokens} tokens, answer included; the {param} "
        f"{'have' if param == 'messages' else 'has'} {what}",
        param=param,
        code="context_length_exceeded",
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if value == []:
        return "empty"
    if isinstance(value, list):
        return "a list of other things"
    return json.dumps(value)[:40] if value is None or isinstance(value, bool | int | float) else "an object"
