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
from smalti.data.tokenizer.chat import ChatFormat
from smalti.data.tokenizer.encode import Tokenizer
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


def option_windows(
    encoder: Encoder, prompt: Prompt, seq_len: int, mode: Mode, chat: ChatFormat | None = None
) -> tuple[list[Window], list[str], bool]:
    """Return a window for each option, the text that it scores, and whether one was cut to fit ``seq_len`` inputs.

    With ``chat`` the prompt is the user's message, and an option is the answer, without white space before it.
    """
    before: list[int]
    ids_of = _published_ids if mode == "v0.3" else _joint_ids
    windows, texts = [], []
    cut = False
    for context in prompt.contexts:
        for text in prompt.continuations:
            continuation = _scored_text(encoder, text, mode, is_chat=chat is not None)
            texts.append(continuation)
            if chat is not None:
                before = []  # the template's tokens, once the room for them is known
                after = list(encoder.tokenizer.encode(continuation))
            else:
                before, after = ids_of(encoder, prompt.head, context, continuation)
                before = before or [encoder.begin_id]
            room = (seq_len if mode == "v0.3" else seq_len + 1) - len(after)
            if room < 1 or not after:
                raise TooLong(
                    f"an answer has {len(after)} tokens and the longest context is {seq_len}",
                    hint="leave the task out, or evaluate with a longer seq_len",
                )
            if chat is not None and prompt.item.messages:
                before = conversation_ids(encoder, chat, prompt.item, room)
            elif chat is not None:
                before, is_cut = chat_ids(encoder, chat, prompt.head + context, room)
                cut = cut or is_cut
            elif len(before) > room:
                cut = True
                before = cut_ids(before, room, keep_first=mode == "fixed")
            windows.append(Window(np.array(before + after, dtype=np.int64), len(before)))
    return windows, texts, cut


def require_whole(n_cut: int, n_prompts: int, seq_len: int, answer_tokens: int = 0) -> None:
    """Raise TooLong where prompts were cut. ``answer_tokens``: the room that they leave for a generated answer."""
    if n_cut:
        less = f" less an answer of {answer_tokens}" if answer_tokens else ""
        raise TooLong(
            f"{n_cut} of {n_prompts} prompts have more tokens than the longest context, {seq_len}{less}",
            hint="cut_prompts=true scores them without their start; or evaluate with a longer seq_len",
        )


def prompt_ids(encoder: Encoder, prompt: Prompt, mode: Mode) -> list[int]:
    """Return the tokens of a prompt to generate from."""
    if mode == "v0.3":
        return [*head_ids(encoder, prompt.head), *encoder.tokenizer.encode(prompt.contexts[0])]
    return [encoder.begin_id, *encoder.tokenizer.encode(prompt.text)]


def conversation_ids(encoder: Encoder, chat: ChatFormat, item: Item, room: int) -> list[int]:
    """Return the tokens of an item's conversation. Raises TooLong where they are more than ``room``."""
    ids = chat.prompt_ids(item.messages, encoder.tokenizer, encoder.begin_id)
    if len(ids) > room:
        raise TooLong(f"line {item.line}: a conversation of {len(ids)} tokens; there is room for {room}")
    return ids


def chat_ids(encoder: Encoder, chat: ChatFormat, text: str, room: int) -> tuple[list[int], bool]:
    """Return the tokens of a chat whose only message is ``text``, cut at its start to ``room`` tokens, and if it was.

    Raises TooLong where the template alone has more.
    """
    message = {"role": "user", "content": text}
    ids = chat.prompt_ids([message], encoder.tokenizer, encoder.begin_id)
    is_cut = len(ids) > room
    while len(ids) > room:
        text_ids = list(encoder.tokenizer.encode(message["content"]))
        if not text_ids:
            raise TooLong(
                f"the chat template has {len(ids)} tokens, and there is room for {room}",
                hint="evaluate with a longer seq_len, or chat=false",
            )
        # What is left of a character whose first tokens are gone is not text, and would grow when it is encoded again.
        message["content"] = encoder.tokenizer.decode(text_ids[len(ids) - room :]).lstrip("\ufffd")
        ids = chat.prompt_ids([message], encoder.tokenizer, encoder.begin_id)
    return ids, is_cut


def head_ids(encoder: Encoder, text: str) -> list[int]:
    """Return the tokens of a text after those that the tokenizer's own template begins with, which may be none."""
    return [*encoder.tokenizer.template_ids, *encoder.tokenizer.encode(text)]


def cut_ids(ids: list[int], room: int, *, keep_first: bool) -> list[int]:
    """Return the last ``room`` ids; with ``keep_first``, the first one and the last ones."""
    if len(ids) <= room:
        return ids
    return [ids[0], *ids[len(ids) - room + 1 :]] if keep_first and room > 1 else ids[len(ids) - room :]


def _scored_text(encoder: Encoder, continuation: str, mode: Mode, *, is_chat: bool) -> str:
    """Return an option as it is scored, with the white space before it."""
    if is_chat:
        return continuation.lstrip() or continuation
    has_space = mode == "v0.3" and len(encoder.tokenizer.encode(" a")) == 1 and not continuation.startswith(" ")
    return " " + continuation if has_space else continuation


def _published_ids(encoder: Encoder, head: str, context: str, continuation: str) -> tuple[list[int], list[int]]:
    encode = encoder.tokenizer.encode
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
