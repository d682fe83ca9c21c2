"""The formats of rows: detects them by their columns, and turns each row into conversations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smalti.base.errors import DataError
from smalti.config.examples import ExampleColumns, ExampleFormat
from smalti.tune.chats.messages import ASSISTANT, Message, check_order, read_messages, read_tools

_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


@dataclass(frozen=True)
class Chat:
    """One row: a conversation, or two that differ in their answers."""

    conversations: tuple[list[dict[str, Any]], ...]
    """The messages; of a preference, those with the chosen answer and those with the rejected one."""
    first: int = 0
    """Number of messages that are the prompt; only later ones are in the loss."""
    tools: list[dict[str, Any]] | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """``margin`` of a preference, ``label`` (0 or 1) of a KTO row."""
    is_text: bool = False
    """A document, without roles: the one message of the assistant."""

    @property
    def group(self) -> str:
        """What the split is chosen by: the first user message without case and layout, or the text."""
        messages = self.conversations[0]
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        return " ".join((first["content"] or "").casefold().split())


class _Row:
    """The columns of a row by the names of ``ExampleColumns``."""

    def __init__(self, value: Mapping[str, Any], columns: ExampleColumns) -> None:
        self._value = value
        self._columns = columns

    def name(self, column: str) -> str:
        name = getattr(self._columns, column)
        if name is None and column == "completion" and "completion" not in self._value and "response" in self._value:
            return "response"
        return str(name or column)

    def has(self, *columns: str) -> bool:
        return all(self._value.get(self.name(column)) is not None for column in columns)

    def get(self, column: str) -> Any:
        return self._value.get(self.name(column))

    def need(self, column: str) -> Any:
        if not self.has(column):
            names = ", ".join(map(str, self._value)) or "none"
            raise DataError(f"there is no '{self.name(column)}'; columns: {names}")
        return self.get(column)

    def text(self, column: str) -> str:
        value = self.need(column)
        if not isinstance(value, str):
            raise DataError(f"'{self.name(column)}' holds {type(value).__name__}, not text")
        return value

    def messages(self, column: str, *, role: str) -> list[dict[str, Any]]:
        """Return a list of messages, or one message of ``role`` where the column is a text."""
        value = self.need(column)
        if not isinstance(value, str | list):
            kind = type(value).__name__
            raise DataError(f"'{self.name(column)}' holds {kind}, not text", allowed="text, or a list of messages")
        try:
            return read_messages([{"role": role, "content": value}] if isinstance(value, str) else value)
        except DataError as error:
            raise DataError(f"'{self.name(column)}': {error.message}", allowed=error.allowed) from error

    def system(self) -> list[dict[str, Any]]:
        return self.messages("system", role="system") if self.get("system") else []


def detect(value: Mapping[str, Any], columns: ExampleColumns) -> ExampleFormat:
    """Return the format of a row by its columns. Raises DataError if it is none."""
    row = _Row(value, columns)
    if row.has("chosen", "rejected"):
        return "preference"
    if row.has("messages"):
        return "chat"
    if row.has("conversations"):
        return "sharegpt"
    if row.has("prompt", "completion"):
        return "kto" if row.has("label") else "prompt"
    if row.has("instruction", "output"):
        return "instruction"
    if row.has("text"):
        return "text"
    null = [str(name) for name, entry in value.items() if entry is None]
    raise DataError(
        f"the columns {', '.join(map(str, value)) or '(none)'} are of no known format"
        + (f"; null: {', '.join(null)}" if null else ""),
        allowed="messages; conversations; instruction and output; prompt and completion (or response); prompt, "
        "chosen and rejected; prompt, completion and label; text",
        hint=None
        if null
        else "name the columns: tune.examples.columns.prompt=question tune.examples.columns.completion=answer",
    )


def read_chat(value: Mapping[str, Any], form: ExampleFormat, columns: ExampleColumns) -> Chat:
    """Return the conversations of a row. Raises DataError that says what is wrong with it."""
    chat = _READERS[form](_Row(value, columns))
    if not chat.is_text:
        for messages in chat.conversations:
            check_order(messages)
    return chat


def _chat(row: _Row) -> Chat:
    return Chat((read_messages(row.need("messages")),), tools=read_tools(row.get("tools")))


def _sharegpt(row: _Row) -> Chat:
    value = row.need("conversations")
    turns = value if isinstance(value, list) else [value]
    renamed = [
        {"role": turn.get("from"), "content": turn.get("value"), "weight": turn.get("weight")}
        if isinstance(turn, Mapping) and "from" in turn
        else turn
        for turn in turns
    ]
    messages = read_messages(renamed, roles=_SHAREGPT_ROLES)
    return Chat(([*row.system(), *messages],), tools=read_tools(row.get("tools")))


def _instruction(row: _Row) -> Chat:
    text = row.text("instruction")
    if row.get("input"):
        text = f"{text}\n\n{row.text('input')}"
    question = {"role": "user", "content": text}
    answer = {"role": ASSISTANT, "content": row.text("output")}
    return Chat((read_messages([*row.system(), question, answer]),))


def _prompt(row: _Row) -> Chat:
    prompt = [*row.system(), *row.messages("prompt", role="user")]
    answer = row.messages("completion", role=ASSISTANT)
    return Chat(([*prompt, *answer],), len(prompt), read_tools(row.get("tools")))


def _kto(row: _Row) -> Chat:
    chat = _prompt(row)
    label = row.need("label")
    if label not in (0, 1):
        raise DataError(f"'{row.name('label')}' holds {label!r}", allowed="true or false")
    return Chat(chat.conversations, chat.first, chat.tools, {"label": float(label)})


def _preference(row: _Row) -> Chat:
    prompt = []
    if row.has("prompt"):
        prompt = [*row.system(), *row.messages("prompt", role="user")]
    elif isinstance(row.get("chosen"), str):
        row.need("prompt")
    answers = [row.messages(column, role=ASSISTANT) for column in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise DataError("chosen and rejected are equal", allowed="two answers that differ")
    if all(answer[0]["role"] == ASSISTANT for answer in answers) and prompt:
        conversations = tuple([*prompt, *answer] for answer in answers)
        first = len(prompt)
    else:  # each is a whole conversation
        first = _n_equal(*answers)
        conversations = tuple(answers)
        if any(len(answer) == first or answer[first]["role"] != ASSISTANT for answer in answers):
            raise DataError(
                f"chosen and rejected differ first in message {first + 1}, which is not an answer in both",
                allowed="the same messages, and then answers of the assistant that differ",
                hint=None if prompt else "name the column of the prompt: tune.examples.columns.prompt=NAME",
            )
    values = {}
    if row.has("margin"):
        margin = row.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DataError(f"'{row.name('margin')}' holds {margin!r}", allowed="a number")
        values["margin"] = float(margin)
    return Chat(conversations, first, read_tools(row.get("tools")), values)


def _n_equal(a: Sequence[Message], b: Sequence[Message]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _text(row: _Row) -> Chat:
    text = row.text("text")
    if not text.strip():
        raise DataError("the text is empty")
    return Chat((read_messages([{"role": ASSISTANT, "content": text}]),), is_text=True)


_READERS: dict[ExampleFormat, Callable[[_Row], Chat]] = {
    "chat": _chat,
    "sharegpt": _sharegpt,
    "instruction": _instruction,
    "prompt": _prompt,
    "preference": _preference,
    "kto": _kto,
    "text": _text,
}
