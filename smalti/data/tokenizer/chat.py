"""How a conversation becomes the tokens that a model continues.

A folder with a chat template (``chat_template.jinja`` or in ``tokenizer_config.json``) is asked in that template's
words, with the names and filters that ``transformers`` offers, so the tokens are those of its ``apply_chat_template``.
A base model has none and gets ``PlainChat``: names before the turns, and stop texts so that it does not go on as the
user.

Promises: a template runs in jinja2's immutable sandbox, in a process of its own with a limit of time and of memory
(``chat_template``), and reaches neither files nor modules nor our objects; a message that quotes a control token
(``<|im_end|>``) is read as text, so nobody can end a turn from inside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.chat_template import TemplateFailed, TemplateProcess
from smalti.data.tokenizer.tokenizer import CONFIG_FILE, SPECIALS_FILE

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_BREAK = "\ufdd0"
"""Put inside a quoted control token until the text is encoded; a noncharacter, so no text holds it on purpose."""

Message = Mapping[str, str]
"""``role`` (system, user, assistant) and ``content``."""


class Encoder(Protocol):
    """What is needed of a tokenizer (``data.tokenizer.tokenizer.Tokenizer``)."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ChatFormat(Protocol):
    """Either of the two below."""

    @property
    def source(self) -> str:
        """Where it comes from; empty for the plain one."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer beside the end tokens."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the answer begins. UserError where these messages cannot be put so."""
        ...

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """The tokens of that text."""
        ...


@dataclass(frozen=True)
class PlainChat:
    """The form for models without a template::

        You are brief.

        User: What is 2+2?

        Assistant: 4.

        User: And 3+3?

        Assistant:

    The system text stands bare at the head. The answer ends before the next ``User:``; it begins with a blank, which
    whoever shows it leaves out.
    """

    source: str = ""
    stops: tuple[str, ...] = ("\nUser:", "\nAssistant:")

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation in the form above."""
        names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
        turns = [names[message["role"]] + message["content"].strip() for message in messages]
        return "\n\n".join([*turns, "Assistant:"])

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """The begin token and the text; nothing in it counts as a control token."""
        return [begin_id, *tokenizer.encode(self.render(messages))]


class TemplateChat:
    """A folder's own template, rendered as ``transformers`` does."""

    stops: tuple[str, ...] = ()

    def __init__(self, template: str, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """``variables`` are what the template may name beside the messages (``bos_token`` ...)."""
        self.source: str = source
        try:
            self._template = TemplateProcess(template, dict(variables or {}))
        except TemplateFailed as error:
            raise DataError(f"{source} is not a chat template that jinja2 can read: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The rendered text. UserError with the template's own words where it refuses the messages."""
        if not messages:
            raise UserError("a conversation without messages", allowed="one message or more")
        try:
            return self._template.render(messages)
        except TemplateFailed as error:
            # Clients of a server read this: the file's name, not where it stands.
            name = self.source.rsplit("/", 1)[-1]
            raise UserError(f"the chat template {name} does not take these messages: {error}") from error

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """Control tokens count where the template writes them; in the messages they are text."""
        controls = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids]
        safe = [{**message, "content": _broken(message["content"], controls)} for message in messages]
        pieces = self.render(safe).split(_BREAK)
        return [token for piece in pieces if piece for token in tokenizer.encode(piece, special=True)]


def load_chat(folder: str | Path) -> ChatFormat:
    """The chat format of an exported or downloaded model; ``PlainChat`` where its folder has no template."""
    folder = str(folder)
    config = _object(store.join(folder, CONFIG_FILE))
    found = _templates(folder, config)
    if not found:
        return PlainChat()
    if "default" not in found:
        raise DataError(f"{folder} names its chat templates {', '.join(sorted(found))}, and none of them 'default'")
    template, source = found["default"]
    return TemplateChat(template, source, _variables(_object(store.join(folder, SPECIALS_FILE)) | config))


def _templates(folder: str, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Name -> (template, where it stands). Files go before what stands in the config, as in transformers."""
    path = store.join(folder, TEMPLATE_FILE)
    if store.exists(path):
        return {"default": (store.read_text(path), path)}
    path = store.join(folder, TEMPLATE_FOLDER, "default.jinja")
    if store.exists(path):
        return {"default": (store.read_text(path), path)}
    source, value = store.join(folder, CONFIG_FILE), config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, source)}
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        value = {one.get("name"): one.get("template") for one in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in [*value, *value.values()]):
        raise DataError(f"{source} has a chat_template that is neither a text nor a list of named texts")
    return {name: (text, source) for name, text in value.items()}


def _variables(config: dict[str, Any]) -> dict[str, Any]:
    """The special tokens by their names, as texts."""
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    lists = {"additional_special_tokens": [_content(one) for one in extra]} if isinstance(extra, list) else {}
    return {key: value for key, value in named.items() if isinstance(value, str)} | lists


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _object(path: str) -> dict[str, Any]:
    value = store.read_json(path) if store.exists(path) else {}
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold an object")
    return value


def _broken(text: str, controls: Sequence[str]) -> str:
    """``text`` with a break inside every control token that it quotes; again, since breaking one may leave another."""
    text = text.replace(_BREAK, "")
    for control in controls:
        if len(control) > 1:
            while control in text:
                text = text.replace(control, control[0] + _BREAK + control[1:])
    return text
