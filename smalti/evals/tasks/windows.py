"""Prompts as token windows.

``v0.3``: head, context and continuation are tokenised one by one, the head after the tokenizer's begin tokens, a
continuation with a space before it where the tokenizer has a token for " a"; all tokens together are at most the
longest context. ``fixed``: context and continuation are one text after the begin token, and the continuation is what
follows as many tokens as the context alone has. Both cut prompts that are too long at their start.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from smalti.base.errors import UserError
from smalti.config.task import Mode
from smalti.data.tokenizer.tokenizer import Tokenizer
from smalti.evals.likelihood import Window
from smalti.evals.tasks.items import Item
from smalti.evals.tasks.prompts import Prompt


class Encoder(Protocol):
    """What makes tokens of a text; an engine has both."""

    tokenizer: Tokenizer
    begin_id: int
    """The token before each text."""


class TooLong(UserError):
    """An answer leaves no room for a prompt in the context."""


def option_windows(encoder: Encoder, prompt: Prompt, seq_len: int, mode: Mode) -> tuple[list[Window], bool]:
    """Return a window for each option, and whether one of them was cut to fit ``seq_len`` inputs."""
    ids_of = _published_ids if mode == "v0.3" else _joint_ids
    windows = []
    cut = False
    for context in prompt.contexts:
        for continuation in prompt.continuations:
            before, after = ids_of(encoder, prompt.head, context, continuation)
            before = before or [encoder.begin_id]
            room = (seq_len if mode == "v0.3" else seq_len + 1) - len(after)
            if room < 1 or not after:
                raise TooLong(
                    f"line {prompt.item.line}: an answer has {len(after)} tokens and the longest context is {seq_len}",
                    hint="leave the task out, or evaluate with a longer seq_len",
                )
            if len(before) > room:
                cut = True
                before = cut_ids(before, room, keep_first=mode == "fixed")
            windows.append(Window(np.array(before + after, dtype=np.int64), len(before)))
    return windows, cut


def prompt_ids(encoder: Encoder, prompt: Prompt, mode: Mode) -> list[int]:
    """Return the tokens of a prompt to generate from."""
    if mode == "v0.3":
        return [*head_ids(encoder, prompt.head), *encoder.tokenizer.encode(prompt.contexts[0])]
    return [encoder.begin_id, *encoder.tokenizer.encode(prompt.text)]


def head_ids(encoder: Encoder, text: str) -> list[int]:
    """Return the tokens of a text after those that the tokenizer's own template begins with, which may be none."""
    return [*encoder.tokenizer.template_ids, *encoder.tokenizer.encode(text)]


def cut_ids(ids: list[int], room: int, *, keep_first: bool) -> list[int]:
    """Return the last ``room`` ids; with ``keep_first``, the first one and the last ones."""
    if len(ids) <= room:
        return ids
    return [ids[0], *ids[len(ids) - room + 1 :]] if keep_first and room > 1 else ids[len(ids) - room :]


def _published_ids(encoder: Encoder, head: str, context: str, continuation: str) -> tuple[list[int], list[int]]:
    encode = encoder.tokenizer.encode
    if len(encode(" a")) == 1 and not continuation.startswith(" "):
        continuation = " " + continuation
    return [*head_ids(encoder, head), *encode(context)], list(encode(continuation))


def _joint_ids(encoder: Encoder, head: str, context: str, continuation: str) -> tuple[list[int], list[int]]:
    whole = encoder.tokenizer.encode(head + context + continuation)
    first = min(len(encoder.tokenizer.encode(head + context)), len(whole) - 1)
    return [encoder.begin_id, *whole[:first]], list(whole[first:])


def differing_windows(encoder: Encoder, item: Item, seq_len: int) -> Sequence[Window]:
    """Return a window for each option of a generated item, scored from the first token in which any two differ."""
    texts = [item.prompt + choice for choice in item.choices]
    rows = [np.array([encoder.begin_id, *encoder.tokenizer.encode(text)], dtype=np.int64) for text in texts]
    longest = max(len(row) for row in rows) - 1
    if longest > seq_len:
        raise UserError(
            f"a question needs {longest} tokens and the longest context is {seq_len}",
            hint="give fewer examples: shots=1",
        )
    shared = 0
    while all(shared < len(row) and row[shared] == rows[0][shared] for row in rows):
        shared += 1
    return [Window(row, shared) for row in rows]
