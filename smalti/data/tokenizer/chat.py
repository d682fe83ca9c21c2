"""Formats a conversation as the tokens that a model continues.

A chat template (``chat_template.jinja`` or in ``tokenizer_config.json``) is rendered as by ``apply_chat_template`` of
``transformers``, with the same tokens. A model without one gets ``PlainChat``.

Guarantees: a template runs in jinja2's immutable sandbox, in a separate process with limits on time and memory
(``chat_template``), without access to files, modules or our objects. Control tokens in messages (``<|im_end|>``) are
read as text, so a message cannot end its turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.chat_template import Conversation, TemplateFailed, TemplateProcess
from smalti.data.tokenizer.encode import CONFIG_FILE, SPECIALS_FILE

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
BREAK = "\ufdd0"
"""Breaks quoted control tokens until the text is encoded; a noncharacter, which texts do not use."""

Message = Mapping[str, str]
"""``role`` (system, user, assistant) and ``content``."""


class Encoder(Protocol):
    """The part of ``data.tokenizer.encode.Tokenizer`` that is used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ChatFormat(Protocol):
    """``PlainChat`` or ``TemplateChat``."""

    @property
    def source(self) -> str:
        """Path of the template; empty for ``PlainChat``."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, besides the end tokens."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text up to the beginning of the answer. UserError if the format does not allow these messages."""
        ...

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """Return the tokens of that text."""
        ...


@dataclass(frozen=True)
class PlainChat:
    """The format for models without a template::

        You are brief.

        User: What is 2+2?

        Assistant: 4.

        User: And 3+3?

        Assistant:

    The system text comes first, without a name. The answer begins with a blank, which callers strip, and ends before
    the next ``User:``.
    """

    source: str = ""
    stops: tuple[str, ...] = ("\nUser:", "\nAssistant:")

    def render(self, messages: Sequence[Message]) -> str:
        """Return the conversation in the format above."""
        names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
        turns = [names[message["role"]] + message["content"].strip() for message in messages]
        return "\n\n".join([*turns, "Assistant:"])

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """Return the begin token and the tokens of the text, none of which is a control token."""
        return [begin_id, *tokenizer.encode(self.render(messages))]


class TemplateChat:
    """The template of a model folder, rendered as by ``transformers``."""

    stops: tuple[str, ...] = ()

    def __init__(self, template: str, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """``variables`` are available to the template besides the messages (``bos_token`` ...)."""
        self.source: str = source
        try:
            self._template = TemplateProcess(template, dict(variables or {}))
        except TemplateFailed as error:
            raise DataError(f"{source} is not a chat template that jinja2 can read: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the rendered text. UserError with the message of the template if it rejects the messages."""
        if not messages:
            raise UserError("a conversation has no messages", allowed="one message or more")
        texts = self.render_prefixes([Conversation([dict(message) for message in messages], [(len(messages), True)])])[
            0
        ]
        if isinstance(texts, UserError):
            raise texts
        return texts[0]

    def render_prefixes(self, conversations: Sequence[Conversation]) -> list[list[str] | UserError]:
        """Return the texts of the prefixes of each conversation, or the error if the template rejects it."""
        results: list[list[str] | UserError] = []
        for texts in self._template.render(conversations):
            if isinstance(texts, TemplateFailed):
                # Clients of a server read this: the name of the file, not its path.
                name = self.source.rsplit("/", 1)[-1]
                results.append(UserError(f"the chat template {name} does not take these messages: {texts}"))
            else:
                results.append(texts)
        return results

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Encoder, begin_id: int) -> list[int]:
        """Return the tokens; control tokens of the template are special, those in messages are text."""
        control_tokens = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids]
        safe = [{**message, "content": break_tokens(message["content"], control_tokens)} for message in messages]
        pieces = self.render(safe).split(BREAK)
        return [token for piece in pieces if piece for token in tokenizer.encode(piece, special=True)]


def load_chat(folder: str | Path) -> ChatFormat:
    """Load the chat format of a model folder; ``PlainChat`` if it has no template."""
    folder = str(folder)
    config = _object(store.join(folder, CONFIG_FILE))
    templates = _templates(folder, config)
    if not templates:
        return PlainChat()
    if "default" not in templates:
        raise DataError(f"{folder} names its chat templates {', '.join(sorted(templates))}, and none of them 'default'")
    template, source = templates["default"]
    return TemplateChat(template, source, template_variables(folder))


def template_variables(folder: str | Path) -> dict[str, Any]:
    """Return the special tokens of a folder's tokenizer by the names that templates have for them (``bos_token``)."""
    config = _object(store.join(folder, SPECIALS_FILE)) | _object(store.join(folder, CONFIG_FILE))
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    lists = {"additional_special_tokens": [_content(token) for token in extra]} if isinstance(extra, list) else {}
    return {key: value for key, value in named.items() if isinstance(value, str)} | lists


def _templates(folder: str, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Name -> (template, its path). Files take precedence over the config, as in transformers."""
    path = store.join(folder, TEMPLATE_FILE)
    if store.exists(path):
        return {"default": (store.read_text(path), path)}
    path = store.join(folder, TEMPLATE_FOLDER, "default.jinja")
    if store.exists(path):
        return {"default": (store.read_text(path), path)}
    source = store.join(folder, CONFIG_FILE)
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, source)}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in [*value, *value.values()]):
        raise DataError(f"{source} has a chat_template that is neither a text nor a list of named texts")
    return {name: (text, source) for name, text in value.items()}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _object(path: str) -> dict[str, Any]:
    value = store.read_json(path) if store.exists(path) else {}
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object")
    return value


def break_tokens(text: str, control_tokens: Sequence[str]) -> str:
    """Insert BREAK into every control token of ``text``; repeated, because a break may complete another token."""
    text = text.replace(BREAK, "")
    for token in control_tokens:
        if len(token) > 1:
            while token in text:
                text = text.replace(token, token[0] + BREAK + token[1:])
    return text
