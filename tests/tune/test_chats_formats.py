"""The formats of tuning data: what each row becomes, and what is said of a wrong one."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smalti.base.errors import DataError, UserError
from smalti.config.examples import ExampleColumns, ExamplesConfig
from smalti.config.load import from_dict
from smalti.tune.chats.files import read_chats
from smalti.tune.chats.formats import Chat, detect, read_chat

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}


def read(value: dict[str, Any], **columns: str) -> tuple[str, Chat]:
    names = ExampleColumns(**columns)
    form = detect(value, names)
    return form, read_chat(value, form, names)


ROWS: dict[str, tuple[dict[str, Any], str, list[dict[str, Any]]]] = {
    "openai": ({"messages": [USER, GOOD]}, "chat", [USER, GOOD]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, GOOD]},
        "chat",
        [USER, GOOD],
    ),
    "sharegpt": (
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]},
        "sharegpt",
        [{"role": "system", "content": "s"}, USER, GOOD],
    ),
    "alpaca": (
        {"instruction": "q", "input": "x", "output": "good"},
        "instruction",
        [{"role": "user", "content": "q\n\nx"}, GOOD],
    ),
    "no input": ({"instruction": "q", "input": "", "output": "good"}, "instruction", [USER, GOOD]),
    "completion": ({"prompt": "q", "completion": "good"}, "prompt", [USER, GOOD]),
    "response": ({"prompt": "q", "response": "good"}, "prompt", [USER, GOOD]),
    "messages": ({"prompt": [USER], "completion": [GOOD]}, "prompt", [USER, GOOD]),
    "kto": ({"prompt": "q", "completion": "good", "label": True}, "kto", [USER, GOOD]),
    "text": ({"text": "good"}, "text", [GOOD]),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_format(name: str) -> None:
    value, form, messages = ROWS[name]
    found, chat = read(value)
    assert (found, chat.conversations) == (form, (messages,))
    assert chat.values == ({"label": 1.0} if form == "kto" else {})
    assert chat.is_text == (form == "text")


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 2},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 2},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 2},
    ],
)
def test_a_preference_is_two_conversations_with_a_common_prompt(value: dict[str, Any]) -> None:
    form, chat = read(value)
    assert (form, chat.first, chat.values) == ("preference", 1, {"margin": 2.0})
    assert chat.conversations == ([USER, GOOD], [USER, BAD])


def test_columns_are_mapped_and_tools_are_read_from_json() -> None:
    form, chat = read({"question": "Q  x", "answer": "good"}, prompt="question", completion="answer")
    assert (form, chat.conversations[0][1], chat.group) == ("prompt", GOOD, "q x")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"role": "tool", "content": "2"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, tool, GOOD]
    _, chat = read({"messages": messages, "tools": '[{"type": "function"}]'})
    assert chat.tools == [{"type": "function"}]
    assert chat.conversations[0][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "there are no messages"),
    ({"messages": [USER]}, "no message is of the assistant"),
    ({"messages": [USER, GOOD, USER]}, "the last message is of user, and has no answer"),
    ({"messages": [GOOD, USER]}, "message 1 is of assistant and is the first"),
    ({"messages": [USER, USER, GOOD]}, "message 2 is of user and follows one of user"),
    ({"messages": [USER, {"role": "system", "content": ""}, GOOD]}, "message 2 is of system"),
    ({"messages": [USER, {"role": "bot", "content": "x"}]}, "message 2 has the role 'bot'"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2, of assistant, is empty"),
    ({"messages": [USER, {"content": "x"}]}, "message 2 has the role None"),
    ({"messages": [USER, {**GOOD, "weight": 2}]}, "weight 2"),
    ({"messages": [USER, {"role": "tool", "content": "x"}, GOOD]}, "message 2 is of tool"),
    ({"messages": [{**USER, "tool_calls": [{}]}, GOOD]}, "message 1 of user has tool_calls"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{}]}]}, "names no function"),
    ({"messages": [USER, GOOD], "tools": "{"}, "tools is not JSON"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "message 1 has the role 'alien'"),
    ({"prompt": 7, "completion": "x"}, "'prompt' holds int, not text"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    ({"chosen": "a", "rejected": "b"}, "there is no 'prompt'; columns: chosen, rejected"),
    ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [BAD]}, "differ first in message 1"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "x"}, "'margin' holds 'x'"),
    ({"prompt": "q", "completion": "a", "label": "good"}, "'label' holds 'good'"),
    ({"instruction": "q", "output": 3}, "'output' holds int, not text"),
    ({"text": " \n"}, "the text is empty"),
    ({"a": 1, "b": 2}, "the columns a, b are of no known format"),
    ({"prompt": "q", "completion": None}, "the columns prompt, completion are of no known format; null: completion"),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_a_wrong_row_says_what_is_wrong(value: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(value)


def write(path: Path, rows: list[dict[str, Any]]) -> ExamplesConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ExamplesConfig(files=(str(path),))


def test_a_wrong_row_is_named_by_file_and_line_or_dropped(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", [{"messages": [USER, GOOD]}, {"messages": [USER]}, {"messages": [USER, BAD]}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: no message is of the assistant(.|\n)*unreadable=drop"):
        list(read_chats(config))
    rows = list(read_chats(config.model_copy(update={"unreadable": "drop"})))
    assert [(row.id, row.chat is None) for row in rows] == [
        ("a.jsonl:1", False),
        ("a.jsonl:2", True),
        ("a.jsonl:3", False),
    ]
    assert rows[1].problem == "no message is of the assistant"


def test_rows_of_two_kinds_are_refused(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    config = write(tmp_path / "a.jsonl", [pair, {**pair, "margin": 1}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: this row has a pair of answers with margin, and earlier"):
        list(read_chats(config))
    write(tmp_path / "a.jsonl", [pair])
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [USER, GOOD]}))
    with pytest.raises(DataError, match=r"b\.jsonl:1: this row has one answer, and earlier ones have a pair"):
        list(read_chats(ExamplesConfig(files=(str(tmp_path),))))


def test_parquet_gives_the_same_chats_as_jsonl(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"id": "x", "messages": [USER, GOOD]},
        {"id": "y", "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                                 {"role": "tool", "content": "2"}, GOOD]},
    ]  # fmt: skip
    config = write(tmp_path / "a.jsonl", rows).model_copy(update={"columns": ExampleColumns(id="id")})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    ours = list(read_chats(config))
    theirs = list(read_chats(config.model_copy(update={"files": (str(tmp_path / "b.parquet"),)})))
    assert [row.id for row in ours] == ["x", "y"] == [row.id for row in theirs]
    assert [row.chat for row in ours] == [row.chat for row in theirs]


def test_what_is_no_file_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="holds no rows"):
        list(read_chats(ExamplesConfig(files=(str(tmp_path),))))
    write(tmp_path / "a.jsonl", [])
    (tmp_path / os.fsdecode(b"M\xfcller.jsonl")).touch()
    with pytest.raises(UserError, match="is not UTF-8"):
        list(read_chats(ExamplesConfig(files=(str(tmp_path),))))
    with pytest.raises(UserError, match="no effect with format: text"):
        from_dict(ExamplesConfig, {"files": ["x"], "format": "text", "turns": "last"}, "test")


def test_a_file_in_another_encoding_has_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "café", "completion": "x"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"a.jsonl:1: byte 0xe9 at offset 15 is not UTF-8(.|\n)*iconv -f ISO-8859-1"):
        list(read_chats(from_dict(ExamplesConfig, {"files": str(tmp_path / "a.jsonl")}).config))


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.csv", "prompt,completion\n", r"a.csv holds no rows of tuning data(.|\n)*read_csv\(\".*a.csv\"\)"),
    ("a.json", "[]", r"holds no rows of tuning data(.|\n)*jq -c '\.\[\]' .*a.json > .*a.jsonl"),
    ("a.jsonl", "[\n{}\n]", r"a.jsonl:1: this line is not valid JSON(.|\n)*each line is one JSON object"),
    ("b.jsonl", '{"messages": [{"role": "human", "content": "x"}]}', r"the role 'human'(.|\n)*the role is 'user'"),
])  # fmt: skip
def test_files_of_other_forms_have_a_hint(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        list(read_chats(from_dict(ExamplesConfig, {"files": str(tmp_path / name)}).config))
