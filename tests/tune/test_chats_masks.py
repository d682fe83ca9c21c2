"""The loss mask of ten families of templates: exactly the assistant's tokens and their end of turn."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_families import CONVERSATION, FAMILIES, Family, Messages, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from smalti.tune.chats import ChatTokenizer, tokenize
from smalti.tune.chats.chat_tokenizer import Request, in_loss


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("families")
    return cache(lambda name: write_folder(FAMILIES[name], place / name))


@cache
def chats(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder)


def conversation_of(family: Family, messages: Messages) -> Messages:
    return messages if family.has_system or messages[0]["role"] != "system" else messages[1:]


def check(family: Family, folder: Path, messages: Messages) -> list[int]:
    """Compare ids and mask with the reference: the text of the tokens of each run of the mask is that of a segment."""
    numbers = in_loss(messages)
    ((ids, mask, _),) = chats(folder).tokenize([Request(messages, numbers)])
    segments: list[list[Any]] = []
    for text, flag in family.segments(messages):
        if segments and segments[-1][1] == flag:
            segments[-1][0] += text
        elif text:
            segments.append([text, flag])
    runs: list[list[Any]] = []
    pieces = [text_of(token, folder) for token in ids]
    for piece, flag in zip(pieces, mask, strict=True):
        if runs and runs[-1][1] == flag:
            runs[-1][0] += piece
        else:
            runs.append([piece, flag])
    # Blanks alone, of tokenizers that write them after special tokens, are on neither side.
    assert comparable(runs, family) == comparable(segments, family)
    return ids


def comparable(parts: list[list[Any]], family: Family) -> list[tuple[bytes, bool]]:
    texts = [(text if isinstance(text, bytes) else text.encode(), bool(flag)) for text, flag in parts]
    if family.is_byte_level:
        return texts
    return [(b"".join(text.split()), flag) for text, flag in texts if text.split()]


@cache
def text_of(token: int, folder: Path) -> bytes:
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = inner.id_to_token(token)
    if token in inner.get_added_tokens_decoder():
        return name.encode()
    if FAMILIES[folder.name].is_byte_level:
        return chats(folder).tokenizer.token_bytes(token)
    if len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_string_is_the_published_one_and_the_mask_covers_the_answers(name: str, folders: Any) -> None:
    family = FAMILIES[name]
    messages = conversation_of(family, CONVERSATION)
    chat = chats(folders(name))._chat
    assert chat.render(messages[:-1]) == family.published
    assert "".join(text for text, _ in family.segments(messages)).startswith(family.published)
    ids = check(family, folders(name), messages)
    text = "".join(text for text, _ in family.segments(messages))
    inner = Tokenizer.from_file(str(folders(name) / "tokenizer.json"))
    assert ids == inner.encode(text, add_special_tokens=False).ids
    ((_, mask, _),) = chats(folders(name)).tokenize([Request(messages, in_loss(messages))])
    assert tokenize(messages, folders(name)) == (ids, mask)


TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "\n",
            "\n\n",
            "who",
            " who\n",
            "\n\nwho",
            "\n who is  there \n",
            "<|im_end|>",
            "</s>",
            "[/INST] </s>\n",
        ]
    ),
    st.text(st.sampled_from("\n\n  abwho<|>é😀"), max_size=12),
)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    messages: Messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": role, "content": draw(TEXTS)} for role in ("user", "assistant")]
    return messages


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_covers_exactly_the_answers_of_any_conversation(name: str, folders: Any) -> None:
    family = FAMILIES[name]

    @settings(max_examples=max(50, settings.default.max_examples // 2), deadline=None)
    @given(conversations())
    def compare(messages: Messages) -> None:
        check(family, folders(name), conversation_of(family, messages))

    compare()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "llama-2", "phi"])
def test_a_prompt_is_trained_as_it_is_served(name: str, folders: Any) -> None:
    folder = folders(name)

    @settings(max_examples=30, deadline=None)
    @given(TEXTS, TEXTS)
    def compare(question: str, answer: str) -> None:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ((ids, mask, _),) = chats(folder).tokenize([Request(messages, [1])])
        served = chats(folder)._chat.prompt_ids(messages[:1], chats(folder).tokenizer, 0)
        assert ids[: mask.index(1)] == served

    compare()
