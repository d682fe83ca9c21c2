"""Items: what is asked, read from the rows of a JSONL file. A row that is not what its task needs is a DataError."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smalti.base.errors import DataError, nearest
from smalti.base.rng import derive_key
from smalti.config.task import Columns, Kind, TaskConfig
from smalti.data.tokenizer.chat import Message, PlainChat
from smalti.evals.rows import read_rows

NEEDED: dict[Kind, dict[str, str]] = {
    "choice": {"context": "query", "choices": "choices", "gold": "gold"},
    "schema": {"contexts": "context_options", "continuation": "continuation", "gold": "gold"},
    "exact": {"context": "context", "continuation": "continuation"},
    "generation": {"context": "context", "answer": "answer"},
    "ifeval": {"context": "prompt", "id": "key"},
}
"""Kind -> field of ``Columns`` that each row needs -> its column if none is named."""
_OPTIONAL = {"aliases": "aliases", "reasoning": "chain_of_thought"}


@dataclass(frozen=True)
class Item:
    """A question. Either ``contexts`` or ``choices`` has several options; ``gold`` is the number of the right one."""

    index: int
    """Number of the row, from 0; blank lines do not count."""
    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int = 0
    answers: tuple[str, ...] = ()
    """Right answers of kind generation, the preferred one first."""
    reasoning: str | None = None
    messages: tuple[Message, ...] = ()
    """The prompt as a conversation, for models with a chat template; ``contexts`` has it as text."""
    id: str | None = None
    cluster: str | None = None
    category: str = ""
    line: int = 0
    """Line in the file, from 1."""

    @property
    def prompt(self) -> str:
        """The context, of an item that has one."""
        return self.contexts[0]

    @cached_property
    def key(self) -> int:
        """A hash of the content: equal in any order of the rows and in any part of them."""
        return derive_key("item", *self.contexts, "|", *self.choices, "|", *self.answers)

    @property
    def options(self) -> tuple[str, ...]:
        """The options: those of the two that are several."""
        return self.contexts if len(self.contexts) > 1 else self.choices

    def labels(self) -> dict[str, Any]:
        """Return what identifies the item in a sample: its index, and id, cluster and category where it has them."""
        named = {"id": self.id, "cluster": self.cluster, "category": self.category or None}
        return {"index": self.index} | {name: value for name, value in named.items() if value is not None}


def read_items(task: TaskConfig) -> list[Item]:
    """Return the items of all rows of a task's file. Raises DataError that names file and line."""
    rows = read_rows(task.file)
    read_item = _READERS[task.kind]
    items = [
        read_item(_Row(task.file, line, row, task.kind, task.columns), index) for index, (line, row) in enumerate(rows)
    ]
    lines: dict[str, int] = {}
    for item in items:
        if item.id is not None and lines.setdefault(item.id, item.line) != item.line:
            raise DataError(
                f"{task.file}:{item.line}: the id '{item.id}' is that of line {lines[item.id]} too",
                allowed="ids that differ, or none",
            )
    return items


@dataclass(frozen=True)
class _Row:
    """A row and where it is; its methods return checked values."""

    file: str
    line: int
    values: dict[str, Any]
    kind: Kind
    columns: Columns

    def error(self, problem: str, allowed: str, hint: str | None = None) -> DataError:
        return DataError(f"{self.file}:{self.line}: {problem}", allowed=allowed, hint=hint)

    def get(self, field: str) -> tuple[str, Any]:
        """Return the column of a field and its value; None where an optional column is absent."""
        name = getattr(self.columns, field)
        column = name or (NEEDED[self.kind] | _OPTIONAL).get(field)
        if column is None:
            return field, None
        if column in self.values:
            return column, self.values[column]
        if name is None and field not in NEEDED[self.kind]:
            return column, None
        close = nearest(column, self.values) or nearest(field, self.values)
        raise self.error(
            f"there is no column '{column}'",
            f"the columns of this row: {', '.join(self.values)}",
            f"name the column in the task: columns: {{{field}: {close or next(iter(self.values), 'NAME')}}}",
        )

    def text(self, field: str) -> str:
        column, value = self.get(field)
        if not isinstance(value, str):
            raise self.error(f"{column} = {json.dumps(value)[:60]} is not text", "a text")
        return value.strip()

    def optional(self, field: str) -> str | None:
        column, value = self.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
            raise self.error(f"{column} = {json.dumps(value)[:60]} is not text", "a text, a whole number or null")
        return None if value is None else str(value)

    def texts(self, field: str, least: int) -> tuple[str, ...]:
        column, value = self.get(field)
        if value is None and least == 0:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value) or len(value) < least:
            raise self.error(f"{column} = {json.dumps(value)[:60]}", f"a list of at least {least} texts")
        return tuple(value)

    def conversation(self) -> tuple[tuple[Message, ...], str]:
        """Return the prompt and the answer of a conversation."""
        column, value = self.get("messages")
        messages = value if isinstance(value, list) else []
        texts = [
            {"role": message["role"], "content": message["content"]}
            for message in messages
            if isinstance(message, dict)
            and message.get("role") in ("system", "user", "assistant")
            and isinstance(message.get("content"), str)
        ]
        roles = [message["role"] for message in texts]
        if len(texts) != len(messages) or roles[-2:] != ["user", "assistant"]:
            raise self.error(
                f"{column} = {json.dumps(value)[:60]}",
                'a list of {"role": system, user or assistant, "content": text} that ends with user and assistant',
            )
        return tuple(texts[:-1]), texts[-1]["content"].strip()

    def gold(self, options: tuple[str, ...]) -> int:
        column, value = self.get("gold")
        if isinstance(value, str) and value in options:
            return options.index(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(options):
            raise self.error(
                f"{column} = {json.dumps(value)[:60]} is none of the {len(options)} options",
                f"0 to {len(options) - 1}, or the text of an option",
            )
        return value

    def labels(self, index: int) -> dict[str, Any]:
        names = {field: self.optional(field) for field in ("id", "cluster")}
        return {"index": index, "line": self.line, "category": self.optional("category") or "", **names}


def _choice(row: _Row, index: int) -> Item:
    choices = row.texts("choices", 2)
    return Item(contexts=(row.text("context"),), choices=choices, gold=row.gold(choices), **row.labels(index))


def _schema(row: _Row, index: int) -> Item:
    contexts = row.texts("contexts", 2)
    continuation = row.text("continuation")
    return Item(contexts=contexts, choices=(continuation,), gold=row.gold(contexts), **row.labels(index))


def _exact(row: _Row, index: int) -> Item:
    if row.columns.messages is not None:
        messages, answer = row.conversation()
        context = PlainChat().render(messages)
        return Item(contexts=(context,), choices=(answer,), messages=messages, **row.labels(index))
    return Item(contexts=(row.text("context"),), choices=(row.text("continuation"),), **row.labels(index))


def _generation(row: _Row, index: int) -> Item:
    if row.columns.messages is not None:
        messages, answer = row.conversation()
        answers = tuple(dict.fromkeys((answer, *row.texts("aliases", 0))))
        context = PlainChat().render(messages)
        return Item(contexts=(context,), choices=(), answers=answers, messages=messages, **row.labels(index))
    answers = tuple(dict.fromkeys((row.text("answer"), *row.texts("aliases", 0))))
    reasoning = row.optional("reasoning")
    return Item(
        contexts=(row.text("context"),),
        choices=(),
        answers=answers,
        reasoning=reasoning and reasoning.strip(),
        **row.labels(index),
    )


def _ifeval(row: _Row, index: int) -> Item:
    return Item(contexts=(row.text("context"),), choices=(), **row.labels(index))


_READERS: dict[Kind, Callable[[_Row, int], Item]] = {
    "choice": _choice,
    "schema": _schema,
    "exact": _exact,
    "generation": _generation,
    "ifeval": _ifeval,
}
