"""Prompts as clients send them, made into the tokens that the engine reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smalti.data.tokenizer.chat import ChatFormat, Message
from smalti.serve.engine.engine import Engine
from smalti.serve.server.errors import ApiError


@dataclass(frozen=True)
class Prompt:
    """Tokens for the engine, and what of them the client wrote."""

    ids: tuple[int, ...]
    text: str
    """What ``echo`` shows."""
    added: int
    """How many tokens at the head the client did not write (the begin token)."""


def read_prompt(value: Any) -> list[str | list[int]]:
    """One text or list of ids, or several. Raises ApiError for anything else."""
    if isinstance(value, str):
        return [value]
    if value is None:
        return [""]
    if isinstance(value, list) and value:
        if all(_is_id(one) for one in value):
            return [value]
        if all(isinstance(one, str) for one in value):
            return list(value)
        if all(isinstance(one, list) and one and all(_is_id(token) for token in one) for one in value):
            return list(value)
    raise ApiError(
        400,
        f"'prompt' is {_kind(value)}; it must be a text, a list of texts, a list of token ids, or a list of such lists",
        param="prompt",
        code="invalid_value",
    )


def to_tokens(prompt: str | list[int], engine: Engine) -> Prompt:
    """A text gets the begin token before it; ids are taken as they are. Raises ApiError where they do not fit."""
    if isinstance(prompt, str):
        ids = [engine.begin_id, *engine.tokenizer.encode(prompt)]
        made = Prompt(tuple(ids), prompt, 1)
    else:
        outside = next((token for token in prompt if not 0 <= token < engine.tokenizer.vocab_size), None)
        if outside is not None:
            shown = str(outside) if -(10**20) < outside < 10**20 else "a number of many digits"
            raise ApiError(
                400,
                f"'prompt' holds the token id {shown}, which the model does not have (0 to "
                f"{engine.tokenizer.vocab_size - 1})",
                param="prompt",
                code="invalid_value",
            )
        made = Prompt(tuple(prompt), engine.tokenizer.decode(prompt, skip_special=False), 0)
    check_length(len(made.ids), engine, "prompt")
    return made


def chat_to_tokens(messages: Sequence[Message], chat: ChatFormat, engine: Engine) -> Prompt:
    """The conversation in the model's own form. Raises ApiError where it does not fit."""
    ids = chat.prompt_ids(messages, engine.tokenizer, engine.begin_id)
    if not ids:
        raise ApiError(400, "these messages make an empty prompt", param="messages", code="invalid_value")
    check_length(len(ids), engine, "messages")
    return Prompt(tuple(ids), "", 0)


def check_length(n_tokens: int, engine: Engine, param: str) -> None:
    """Raises ApiError where no room is left for an answer of one token."""
    if n_tokens >= engine.limit_tokens:
        raise ApiError(
            400,
            f"This model's maximum context length is {engine.limit_tokens} tokens, answer included; the {param} "
            f"{'have' if param == 'messages' else 'has'} {n_tokens}",
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
