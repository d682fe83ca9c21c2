"""Turns conversations into token ids and a loss mask, with the chat template of a model.

The mask comes from rendering prefixes (``spans``), not from marks in the template. The ids are those of the template in
``smalti serve``: control tokens inside messages are read as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.chat import BREAK, TEMPLATE_FILE, TemplateChat, break_tokens, load_chat, template_variables
from smalti.data.tokenizer.chat_template import Conversation
from smalti.data.tokenizer.encode import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from smalti.tune.chats.mask import encode_spans
from smalti.tune.chats.messages import ASSISTANT, WEIGHT, Message, arguments_as_text, read_messages, read_tools
from smalti.tune.chats.spans import PROBE_MESSAGES, PROBE_PREFIXES, ControlTokens, Renderings, Span, end_of_turn
from smalti.tune.chats.templates import chatml, joined, write_template


class Tokens(NamedTuple):
    """A conversation as tokens."""

    ids: list[int]
    mask: list[int]
    """For each id 1 if it is in the loss, else 0."""
    n_loss_bytes: int
    """UTF-8 bytes of the text in the loss, without the ends of turn."""


_BUILT_IN = {"chatml": chatml, "none": joined}


@dataclass(frozen=True)
class Request:
    """A conversation to tokenize."""

    messages: Sequence[Message]
    in_loss: Sequence[int]
    """Numbers of the messages in the loss, ascending."""
    tools: Sequence[Mapping[str, Any]] | None = None


class ChatTokenizer:
    """A tokenizer with a chat template; tokenizes many conversations at once."""

    def __init__(self, folder: str | Path, template: str = "model") -> None:
        """Load the tokenizer of ``folder``, a model or tokenizer folder.

        ``template``: ``model`` (the folder's own), ``chatml``, ``none`` (prompt and completion are joined), or the path
        of a .jinja file.

        Raises:
            UserError: there is no such template.
            DataError: no mask can be made with it (``spans.end_of_turn``).
        """
        self.tokenizer = load_tokenizer(folder)
        self.text = ""
        """The template, unless it is the folder's own."""
        self._chat = self._load(str(folder), template)
        added, special_ids = self.tokenizer.added_tokens, self.tokenizer.special_ids
        self._specials = [name for name, token in added.items() if token in special_ids and len(name) > 1]
        self._first_characters = {token[0] for token in self._specials}
        self._controls = ControlTokens({*added, self.tokenizer.eod_token})
        self._end = end_of_turn(self._probe(template), self._controls)
        self.end_id: int = self.tokenizer.encode(self._end.text, special=True)[-1]
        """The token that ends an answer."""

    def write_to(self, folder: str | Path) -> None:
        """Give the model or tokenizer in ``folder`` this template, and the end tokens for generation."""
        write_template(folder, self.text, [self.tokenizer.eod_id, self.end_id])

    def tokenize(self, requests: Sequence[Request]) -> list[Tokens | UserError]:
        """Return ids and mask of each conversation, or the error if the template or tokenizer does not allow it."""
        renderings = [Renderings(request.messages, request.in_loss, request.tools) for request in requests]
        conversations = [
            Conversation(self._safe(request.messages), rendering.prefixes, self._safe(request.tools))
            for request, rendering in zip(requests, renderings, strict=True)
        ]
        results: list[UserError | None] = []
        rendered = []
        for rendering, texts in zip(renderings, self._render(conversations), strict=True):
            try:
                if isinstance(texts, UserError):
                    raise texts
                rendered.append(rendering.spans(texts, self._end, self._controls))
                results.append(None)
            except UserError as error:
                results.append(error)
        encoded = iter(zip(encode_spans(rendered, self.tokenizer), rendered, strict=True))
        return [error or self._result(*next(encoded)) for error in results]

    def _render(self, conversations: list[Conversation]) -> list[list[str] | UserError]:
        """Render conversations; templates that join the arguments of tool calls to texts get them as JSON text."""
        results = self._chat.render_prefixes(conversations)
        again = [
            number
            for number, (conversation, texts) in enumerate(zip(conversations, results, strict=True))
            if isinstance(texts, UserError) and any(message.get("tool_calls") for message in conversation.messages)
        ]
        with_texts = [
            replace(conversations[number], messages=arguments_as_text(conversations[number].messages))
            for number in again
        ]
        for number, texts in zip(again, self._chat.render_prefixes(with_texts) if again else [], strict=True):
            if not isinstance(texts, UserError):
                results[number] = texts
        return results

    def _result(
        self, encoded: tuple[list[int], list[int]] | DataError, rendered: tuple[str, list[Span]]
    ) -> Tokens | UserError:
        if isinstance(encoded, DataError):
            return encoded
        text, spans = rendered
        answers = [text[span.begin : span.end].replace(BREAK, "").removesuffix(self._end.text) for span in spans]
        return Tokens(*encoded, sum(len(answer.encode("utf-8", "replace")) for answer in answers))

    def _load(self, folder: str, template: str) -> TemplateChat:
        if template == "model":
            chat = load_chat(folder)
            if not isinstance(chat, TemplateChat):
                raise UserError(
                    f"{folder} has no chat template",
                    allowed=f"{TEMPLATE_FILE}, or chat_template in {CONFIG_FILE}",
                    hint="tune.examples.template=chatml, for a base model",
                )
            return chat
        if template in _BUILT_IN:
            self.text = _BUILT_IN[template](self.tokenizer, folder)
            return TemplateChat(self.text, template)
        if not template.endswith(".jinja"):
            raise UserError(
                f"there is no template '{template}'", allowed="model, chatml, none, or the path of a .jinja file"
            )
        self.text = store.read_text(template)
        return TemplateChat(self.text, template, template_variables(folder))

    def _probe(self, template: str) -> list[str]:
        messages = PROBE_MESSAGES[:2] if template == "none" else PROBE_MESSAGES
        prefixes = [(min(n, len(messages)), prompt) for n, prompt in PROBE_PREFIXES]
        texts = self._chat.render_prefixes([Conversation(messages, prefixes)])[0]
        if isinstance(texts, UserError):
            raise texts
        return texts

    def _safe(self, value: Any) -> Any:
        """Return messages or tools with a BREAK in each control token inside a text."""
        if isinstance(value, str):
            if BREAK not in value and not any(character in value for character in self._first_characters):
                return value
            return break_tokens(value, self._specials)
        if isinstance(value, Mapping):
            return {key: entry if key == "role" else self._safe(entry) for key, entry in value.items() if key != WEIGHT}
        return [self._safe(entry) for entry in value] if isinstance(value, list | tuple) else value


def tokenize(
    messages: Sequence[Message],
    folder: str | Path,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str = "model",
    last_turn: bool = False,
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and for each 1 if it is in the loss, else 0.

    In the loss are the assistant's messages (with ``last_turn`` the last one) with their ends of turn; OpenAI's
    ``weight: 0`` leaves one out.

    Args:
        messages: ``[{"role": "user", "content": "..."}, ...]``, in the form of OpenAI's API.
        folder: A model or tokenizer folder.
        tools: Functions that the assistant may call, as JSON schemas.
        template: ``model`` (the folder's own), ``chatml``, ``none``, or the path of a .jinja file.

    Raises:
        DataError: a message is wrong, none is of the assistant, or the template gives no exact mask.
        UserError: there is no template, or it rejects these messages.
    """
    conversation = read_messages(messages)
    numbers = in_loss(conversation, turns="last" if last_turn else "all")
    if not any(message["role"] == ASSISTANT for message in conversation):
        raise DataError("no message is of the assistant", allowed="an answer of the assistant")
    request = Request(conversation, numbers, read_tools(list(tools) if tools else None))
    (result,) = _chat_tokenizer(str(folder), template, _stamps(str(folder), template)).tokenize([request])
    if isinstance(result, UserError):
        raise result
    return result.ids, result.mask


def in_loss(
    messages: Sequence[Message], *, roles: Sequence[str] = (ASSISTANT,), turns: str = "all", first: int = 0
) -> list[int]:
    """Return the numbers of the messages in the loss: of ``roles``, from ``first`` on, without those of weight 0."""
    numbers = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] in roles and message.get(WEIGHT, 1)
    ]
    return numbers[-1:] if turns == "last" else numbers


@lru_cache(maxsize=16)
def _chat_tokenizer(folder: str, template: str, stamps: tuple[tuple[int, int], ...]) -> ChatTokenizer:
    return ChatTokenizer(folder, template)


def _stamps(folder: str, template: str) -> tuple[tuple[int, int], ...]:
    """Return time and size of the files that decide the tokens, by which a changed folder is loaded again."""
    paths = [Path(template), *(Path(folder, name) for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE))]
    return tuple((stat.st_mtime_ns, stat.st_size) for path in paths if path.is_file() for stat in [path.stat()])
