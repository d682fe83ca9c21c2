"""Near-duplicate rows of tuning data: near a held-out or an earlier row, with equal values."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from smalti.config.examples import ExamplesConfig
from smalti.data.documents.heldout import HELDOUT, split_of
from smalti.tune.chats.files import read_chats


def _config(path: Path, rows: list[dict[str, Any]]) -> ExamplesConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ExamplesConfig(files=(str(path),), heldout_frac=0.3, dedup="near")


@pytest.mark.slow
def test_near_rows_are_dropped(tmp_path: Path) -> None:
    pytest.importorskip("daft")
    from smalti.tune.chats.near import near_duplicates

    random.seed(1)
    texts = [" ".join(random.choices([f"w{n}" for n in range(999)], k=30)) for _ in range(60)]
    rows = [{"prompt": text, "completion": text[::-1]} for text in texts]
    copies = [{"prompt": f"{row['prompt']}, please!", "completion": row["completion"]} for row in rows]
    config = _config(tmp_path / "a.jsonl", [*rows, *copies])
    chats = [row.chat for row in read_chats(config)]
    heldout = [chat is not None and split_of(chat.group, seed=17, heldout_frac=0.3) == HELDOUT for chat in chats]
    expected = set()
    for number in range(60):
        if not heldout[number + 60]:
            expected.add(number + 60)
        elif not heldout[number]:
            expected.add(number)
    assert near_duplicates(config) == expected
    assert 60 > len(expected) > 40
    labelled = [{**row, "label": number < 60} for number, row in enumerate([*rows, *copies])]
    assert near_duplicates(_config(tmp_path / "b.jsonl", labelled)) == set()
    for few in ([], rows[:1], [{"prompt": "a", "completion": "b"}, *rows]):
        assert near_duplicates(_config(tmp_path / "c.jsonl", few)) == set()


WORDS = [f"w{n}" for n in range(40)]
PROMPT, ANSWER, OTHER = " ".join(WORDS), " ".join(WORDS[:9]), " ".join(WORDS[5:15])


def _chat(question: str, answer: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", **answer}]
    return {"messages": [{"role": "system", "content": PROMPT}, *turns]}


def _call(city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return _chat(PROMPT, {"content": None, "tool_calls": [{"type": "function", "function": function}]})


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        pytest.param(
            [_chat("The capital of Italy?", {"content": "Rome"}), _chat("What is 2 plus 2?", {"content": "It is 4"})],
            set(), id="one system message",
        ),
        pytest.param([_call("Rome"), _call("Oslo"), _call("Rome")], {2}, id="tool calls"),
        pytest.param(
            [_pair(PROMPT, ANSWER, OTHER), _pair(PROMPT, OTHER, ANSWER), _pair(f"{PROMPT}!", ANSWER, OTHER)],
            {2}, id="order of answers",
        ),
        pytest.param([_pair(PROMPT, "a b", "b a"), _pair(PROMPT, "b a", "a b")], set(), id="equal words"),
    ],
)  # fmt: skip
def test_rows_that_teach_something_else_are_kept(rows: list[dict[str, Any]], dropped: set[int], tmp_path: Path) -> None:
    pytest.importorskip("daft")
    from smalti.tune.chats.near import near_duplicates

    config = _config(tmp_path / "a.jsonl", rows).model_copy(update={"heldout_frac": 0.0})
    assert near_duplicates(config) == dropped
