"""How a conversation becomes the tokens that a model continues.

A folder with a chat template (``chat_template.jinja`` or in ``tokenizer_config.json``) is asked in that template's
words, with the names and filters that ``transformers`` offers, so the tokens are those of its ``apply_chat_template``.
A base model has none and gets ``PlainChat``: names before the turns, and stop texts so that it does not go on as the
user.

Promises: a template runs in jinja2's immutable sandbox and reaches neither files nor modules nor our objects; a message
that quotes a control token (``<|im_end|>``) is read as text, so nobody can end a turn from inside it.
Does not promise: a bound on the time or memory that a template takes (it comes with the weights, and is as trusted).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from smalti.base import store
from smalti.base.errors import DataError, UserError, missing_extra
from smalti.data.tokenizer.encode import CONFIG_FILE, SPECIALS_FILE

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_BREAK = "\ufdd0"
"""Put inside a quoted control token until the text is encoded; a noncharacter, so no text holds it on purpose."""

Message = Mapping[str, str]
"""``role`` (system, user, assistant) and ``content``."""


class Encoder(Protocol):
    """What is needed of a tokenizer (``data.tokenizer.encode.Tokenizer``)."""

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
        self._variables = dict(variables or {})
        self._template = _compile(template, source)

    def render(self, messages: Sequence[Message]) -> str:
        """The rendered text. UserError with the template's own words where it refuses the messages."""
        if not messages:
            raise UserError("a conversation without messages", allowed="one message or more")
        plain = [dict(message) for message in messages]
        try:
            return str(self._template.render(messages=plain, tools=None, documents=None, add_generation_prompt=True,
                                             **self._variables))  # fmt: skip
        except Exception as error:  # a template is a program: it may raise anything
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


def _compile(template: str, source: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise missing_extra("jinja2", "serve", f"the chat template {source}") from error
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(f"{source} is not a chat template that jinja2 can read: {error}") from error


def _environment() -> Any:
    """jinja2 as ``transformers.utils.chat_template_utils`` sets it up."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says, for training; here it is passed through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants a class attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    class GuardedNamespace(Namespace):
        """Attributes of a namespace whose name begins with an underscore would reach Python's own."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a chat template may not set '{name}'")
            super().__setitem__(name, value)

    def namespace(**values: Any) -> Namespace:
        made = GuardedNamespace()
        for name, value in values.items():
            made[name] = value
        return made

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = namespace
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes <, > and &, which a model would then have to read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
