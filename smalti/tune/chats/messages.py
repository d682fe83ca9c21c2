"""Messages of a conversation: the roles, their order, and the form in which templates take them.

The form is that of ``transformers``: ``content`` is text (or None beside tool calls), the arguments of a tool call are
an object.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.errors import DataError

Message = Mapping[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
WEIGHT = "weight"
"""Key of a message, 0 or 1, as in OpenAI's format: an assistant's message of weight 0 is not in the loss."""


def read_messages(value: Any, *, roles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return a list of messages in the form for templates, absent keys removed.

    ``roles``: name in the file -> role. Raises DataError that says what is wrong with which message.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"the messages are {_kind(value)}, not a list", allowed='[{"role": ..., "content": ...}, ...]')
    if not value:
        raise DataError("there are no messages", allowed="one message or more")
    return [_message(message, f"message {number}", roles) for number, message in enumerate(value, start=1)]


def check_order(messages: Sequence[Message]) -> None:
    """Raise DataError unless system comes first, user and assistant alternate with text, and the assistant is last.

    A call of tools is followed by ``tool`` messages, and those by the assistant.
    """
    if not any(message["role"] == ASSISTANT for message in messages):
        raise DataError("no message is of the assistant", allowed="an answer of the assistant in every conversation")
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        role = "system" if role == "developer" else role
        if role not in _FOLLOWERS[before]:
            place = f"follows one of {before}" if before else "is the first"
            raise DataError(
                f"message {number} is of {message['role']} and {place}", allowed=" or ".join(_FOLLOWERS[before])
            )
        before = "assistant that called tools" if role == ASSISTANT and message.get("tool_calls") else role
        if role in ("user", ASSISTANT) and not message["content"] and not message.get("tool_calls"):
            raise DataError(f"message {number}, of {role}, is empty", allowed="text, or a call of tools")
    if messages[-1]["role"] != ASSISTANT:
        raise DataError(
            f"the last message is of {messages[-1]['role']}, and has no answer",
            allowed="an answer of the assistant at the end",
        )


_FOLLOWERS = {
    "": ("system", "user"),
    "system": ("user",),
    "user": (ASSISTANT,),
    ASSISTANT: ("user",),
    "assistant that called tools": ("tool",),
    "tool": ("tool", ASSISTANT),
}


_OTHER_NAMES = {
    **dict.fromkeys(
        ("human", "Human", "User"), "the role is 'user'; ShareGPT's 'from: human' is read too, in 'conversations'"
    ),
    **dict.fromkeys(("gpt", "bot", "ai", "model", "Assistant"), "the role is 'assistant'"),
}
"""Usual names that are no roles -> a hint."""


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the list of tools (JSON schemas of functions), which may be given as JSON text; None if there are none."""
    if isinstance(value, str) and value.strip():
        value = _json(value, "tools")
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("tools is not a list of objects", allowed='[{"type": "function", "function": {...}}]')
    for tool in value:
        if not isinstance(tool.get("function", {}), dict):
            raise DataError("the function of a tool is no object", allowed='{"function": {"name": ...}}')
    return value


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text, as in OpenAI's format."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _message(value: Any, name: str, roles: Mapping[str, str] | None) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {_kind(value)}, not an object", allowed='{"role": "user", "content": "..."}')
    message = {key: entry for key, entry in value.items() if entry is not None}
    name_of_role = message.get("role")
    role = roles.get(str(name_of_role), "") if roles else name_of_role
    if not isinstance(role, str) or role not in ROLES:
        hint = None if roles else _OTHER_NAMES.get(str(name_of_role))
        raise DataError(f"{name} has the role {name_of_role!r}", allowed=", ".join(roles or ROLES), hint=hint)
    message["role"] = role
    if message.get("tool_calls"):
        if role != ASSISTANT:
            raise DataError(f"{name} of {role} has tool_calls", allowed="tool_calls in messages of the assistant")
        message["tool_calls"] = [_call(call, name) for call in _list(message["tool_calls"], f"tool_calls of {name}")]
    else:
        message.pop("tool_calls", None)
    message["content"] = _content(message.get("content"), name, may_be_absent="tool_calls" in message)
    if message.get(WEIGHT, 1) not in (0, 1):
        raise DataError(f"{name} has the weight {message[WEIGHT]!r}", allowed="0 or 1")
    return message


def _content(value: Any, name: str, *, may_be_absent: bool) -> str | None:
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if value is None and may_be_absent:
        return None
    if not isinstance(value, str):
        raise DataError(f"the content of {name} is {_kind(value)}", allowed="text, or a list of parts of type text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the content of {name} holds half of a surrogate pair: {error}", allowed="Unicode") from error
    return value


def _call(value: Any, name: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"a tool call of {name} names no function",
            allowed='{"type": "function", "function": {"name": "f", "arguments": {...}}}',
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as in OpenAI's format; templates take the object
        arguments = _json(arguments, f"the arguments of a tool call of {name}") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments of a tool call of {name} are {_kind(arguments)}", allowed="an object")
    call = {key: entry for key, entry in value.items() if entry is not None}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}") from error


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{name} is {_kind(value)}, not a list")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "absent"
    return f"{type(value).__name__} ({str(value)[:40]!r})"
