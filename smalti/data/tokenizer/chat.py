"""The plain chat form for a base model: a transcript that the model continues.

A base model has seen no roles; names before each turn are enough for it to go on in the manner of a dialogue. Models
that were tuned bring a template of their own.
"""

from collections.abc import Mapping, Sequence

from smalti.base.errors import UserError

_NAMES = {"user": "User", "assistant": "Assistant"}
ROLES = ("system", *_NAMES)

STOP_TEXTS = ("\nUser:", "\nAssistant:")
"""Where the model begins to speak for the other side."""


def render(messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
    """``[{"role": "user", "content": "Hi"}]`` -> ``User: Hi\\nAssistant:``; a system message comes first, unnamed.

    With ``add_generation_prompt`` the text ends where the assistant's answer begins (no blank: tokens bring their own).
    """
    turns: list[str] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise UserError(
                f"message {number} is {dict(message)}", allowed=f"role of {', '.join(ROLES)} and content as text"
            )
        if role == "system":
            if number:
                raise UserError(
                    f"message {number} has the role 'system'", allowed="a system message as the first one only"
                )
            turns.append(f"{content.strip()}\n")
        else:
            turns.append(f"{_NAMES[role]}: {content.strip()}")
    if add_generation_prompt:
        turns.append("Assistant:")
    return "\n".join(turns)
