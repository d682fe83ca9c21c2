"""The requests that OpenAI's clients send, validated.

Guarantees: a field that would change the answer is honoured or refused by name; an unknown field is ignored and named
in a header of the answer. ``null`` means absent, as with OpenAI. Numbers are numbers: "16" and true are refused.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from smalti.serve.engine.sampling import MIN_TEMPERATURE
from smalti.serve.server.errors import ApiError, unsupported

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
"""Limit on messages, and on the parts of a message."""

_SEED = 1 << 63
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
"""Fields of OpenAI's API and of vLLM's extras that would change the answer, with the values that have no effect."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    elsewhere: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {}
    """Fields of the other route: why they are refused, and the values that have no effect."""


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class _GenerationRequest(_Body):
    """The fields of both routes."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"{value} is neither 0 (the likeliest token) nor {MIN_TEMPERATURE} or more")
        return value

    def longest(self) -> int | None:
        """Return the maximum number of tokens of an answer, by either of its two names."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(
                400, "'max_tokens' and 'max_completion_tokens' differ", param="max_tokens", code="invalid_value"
            )
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def stops(self) -> tuple[str, ...]:
        """Return the stop texts as a tuple."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops):
            raise ApiError(
                400,
                f"'stop' takes at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
                param="stop",
                code="invalid_value",
            )
        return stops

    def usage_in_stream(self) -> bool:
        """Return whether the stream ends with a chunk that counts tokens."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options", code="invalid_value")
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Any = ""
    """A text, a list of texts, a list of token ids, or a list of such lists; see ``prompts.read_prompt``."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    elsewhere = {
        "messages": ("is for /v1/chat/completions; here it is 'prompt'", ()),
        "top_logprobs": ("is for /v1/chat/completions; here 'logprobs' is their number", ()),
    }


class ContentPart(_Body):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None

    def plain(self, place: str) -> dict[str, str]:
        """Return role and text. Raises ApiError for tools, parts that are not text, and a message without content.

        OpenAI's API also has messages without content: an assistant's that calls a tool (refused as such), that
        refuses, or that is audio.
        """
        if self.role in ("tool", "function") or any(
            (self.model_extra or {}).get(name) for name in ("tool_calls", "function_call")
        ):
            raise unsupported("messages", "holds a call of a tool or its result; this server has no tools")
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        if not self.content:
            kind = "an empty list" if self.content == [] else "missing"
            raise _no_text(f"'{place}.content' is {kind}; it must be a text, or a list of parts of type text")
        for index, part in enumerate(self.content):
            if part.type != "text":
                raise unsupported("messages", f"holds a part of type {_short(part.type)}; this server takes text")
            if part.text is None:
                raise _no_text(f"'{place}.content.{index}.text' is missing")
        return {"role": role, "content": "\n".join(part.text or "" for part in self.content)}


class ChatRequest(_GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    elsewhere = {
        "prompt": ("is for /v1/completions; here it is 'messages'", ("",)),
        "echo": ("is for /v1/completions", (False,)),
    }


T = TypeVar("T", CompletionRequest, ChatRequest)


async def read(request: Request, model: type[T]) -> T:
    """Parse the body as ``model``. Raises ApiError with the field that is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the body is of type '{kind[:40]}', not JSON; send the header 'Content-Type: application/json'"
        )
    try:
        raw = await request.body()
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        if b"\\u" in raw:  # JSON can escape half of a surrogate pair, which has no UTF-8 encoding
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"the body is not JSON that can be read: {why}", code="invalid_json") from None
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        # Every member of a union reports an error: the deepest location is the most specific.
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(problems, key=lambda problem: len(problem["loc"]))
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _is_field(part))
        param = str(first["loc"][0]) if first["loc"] else None
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(400, f"'{place}': {first['msg']}", param=param, code=code) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    _check_unsupported(parsed)
    return parsed


def ignored(body: BaseModel) -> str:
    """Return the fields that had no effect as the value of a header; empty when there are none."""
    names = list(dict.fromkeys(_unknown(body)))
    shown = ", ".join(json.dumps(name[:40])[1:-1] for name in names[:20])
    return shown if len(names) <= 20 else f"{shown}, and {len(names) - 20} more"


def _unknown(body: BaseModel, place: str = "") -> Iterator[str]:
    """Yield the names of unknown fields, dotted for nested ones."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and (place or name not in _NO_EFFECT):
            yield place + name
    for name in type(body).model_fields:
        value = getattr(body, name)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, BaseModel):
                yield from _unknown(child, f"{place}{name}.")


def _check_unsupported(body: _Body) -> None:
    for name, (why, neutral) in body.elsewhere.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and not _is_among(value, neutral):
            raise unsupported(name, why)
    for name, value in (body.model_extra or {}).items():
        if value is None or name not in _NO_EFFECT or _is_among(value, _NO_EFFECT[name]):
            continue
        if name == "best_of" and value == getattr(body, "n", None):
            continue
        alternatives = "".join(f", or give {json.dumps(neutral)}" for neutral in _NO_EFFECT[name])
        raise unsupported(name, f"is not supported; leave it out{alternatives}")


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but not in JSON.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_field(part: str) -> bool:
    """Return whether a part of pydantic's location is a field, not the member of a union (``str``, ``list[...]``)."""
    return part.isidentifier() and part != "str"


def _no_text(message: str) -> ApiError:
    return ApiError(400, message, param="messages", code="missing_required_parameter")


def _short(text: str) -> str:
    return json.dumps(text[:40])
