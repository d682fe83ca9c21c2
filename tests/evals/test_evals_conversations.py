"""Tasks whose prompts are conversations, and answers that must be right to the letter."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_models import ByteTokenizer, llama_config, tiny_model

from smalti.base.errors import DataError, UserError
from smalti.config.eval import EvalConfig
from smalti.config.task import TaskConfig
from smalti.evals import likelihood, suite
from smalti.evals.graders.answers import verbatim
from smalti.evals.tasks import generation
from smalti.evals.tasks.items import read_items
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import Completion

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+3"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "twice that"},
    {"role": "assistant", "content": "10"},
]


class Chat:
    """A chat format in a few characters."""

    source = "folder/chat_template.jinja"
    stops: tuple[str, ...] = ()

    def render(self, messages):
        raise NotImplementedError

    def prompt_ids(self, messages, tokenizer, begin_id):
        text = "".join(f"[{message['role'][0]}:{message['content']}]" for message in messages)
        return [begin_id, *tokenizer.encode(text)]


def _task(folder: Path, rows: list[object], **fields: object) -> TaskConfig:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"messages": row, "part": f"p{n}"}) + "\n" for n, row in enumerate(rows)))
    return TaskConfig.model_validate(
        {"kind": "generation", "file": str(path), "columns": {"messages": "messages", "category": "part"}, **fields}
    )


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(llama_config(context=512)), ByteTokenizer(), name="tiny")


def test_the_last_message_is_the_answer_and_the_others_are_the_prompt(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []

    def answer(engine, ids, params):
        prompts.extend(bytes(row[1:]).decode() for row in ids)
        return [Completion("", text, (), "stop", 1) for text in ("10", "10 or so")]

    monkeypatch.setattr(generation, "generate", answer)
    task = _task(tmp_path, [MESSAGES, MESSAGES], verbatim=True)
    score = suite.run(engine, EvalConfig(tasks=[task]), chat=Chat())["tasks"]["t"]
    assert prompts == ["[s:Be brief.][u:2+3][a:5][u:twice that]"] * 2
    assert {name: part["accuracy"] for name, part in score["categories"].items()} == {"p0": 1.0, "p1": 0.0}
    prompts.clear()
    suite.run(engine, EvalConfig(tasks=[task]))
    assert prompts[0] == "Be brief.\n\nUser: 2+3\n\nAssistant: 5\n\nUser: twice that\n\nAssistant:"
    with pytest.raises(UserError, match="line 1: a conversation of 40 tokens; there is room for"):
        suite.run(engine, EvalConfig(tasks=[task], seq_len=30), chat=Chat())


@pytest.mark.parametrize("row", [[], MESSAGES[:4], "text", [{"role": "tool", "content": "x"}, *MESSAGES]])
def test_a_row_without_a_question_and_its_answer(tmp_path: Path, row: object) -> None:
    with pytest.raises(DataError, match=r"t.jsonl:2: messages = "):
        read_items(_task(tmp_path, [MESSAGES, row]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shots": 1}, "shots cannot be given with columns.messages"),
        ({"kind": "choice"}, "kind: choice cannot be given with columns.messages"),
        ({"columns": {"messages": "a", "answer": "b"}}, "columns.answer cannot be given with columns.messages"),
        ({"kind": "exact", "columns": {}, "verbatim": True}, "verbatim is for kind: generation"),
    ],
)
def test_options_without_an_effect(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _task(tmp_path, [MESSAGES], **fields)


def test_verbatim_answers() -> None:
    assert verbatim(" 71\n", ["71"]).correct
    for text in ("71.", "71 or so", "71\n72", "", "071"):
        assert not verbatim(text, ["71"]).correct


@pytest.mark.parametrize("chat", [Chat(), None])
def test_the_answer_of_a_conversation_is_scored_by_likelihood(
    engine: Engine, tmp_path: Path, chat: Chat | None
) -> None:
    task = _task(tmp_path, [MESSAGES, MESSAGES[:3]], kind="exact")
    result = suite.run(engine, EvalConfig(tasks=[task]), str(tmp_path), chat=chat)
    rows = [json.loads(line) for line in Path(result["folder"], "samples.jsonl").read_text().splitlines()]
    prompts = (
        ["[s:Be brief.][u:2+3][a:5][u:twice that]", "[s:Be brief.][u:2+3]"]
        if chat
        else [
            "Be brief.\n\nUser: 2+3\n\nAssistant: 5\n\nUser: twice that\n\nAssistant:",
            "Be brief.\n\nUser: 2+3\n\nAssistant:",
        ]
    )
    texts = [("" if chat else " ") + text for text in ("10", "5")]
    assert [row["choices"] for row in rows] == [["10"], ["5"]]
    for row, prompt, text in zip(rows, prompts, texts, strict=True):
        ids = np.array([256, *prompt.encode(), *text.encode()])
        (nats,) = likelihood.score(engine.model, [likelihood.Window(ids, 1 + len(prompt))])
        assert row["log_likelihoods"] == [pytest.approx(-nats, rel=1e-5)]
    if chat:
        with pytest.raises(UserError, match="line 1: a conversation of 40 tokens; there is room for 29"):
            suite.run(engine, EvalConfig(tasks=[task], seq_len=30), chat=chat)
