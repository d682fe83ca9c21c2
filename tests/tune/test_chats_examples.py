"""Examples of whole files: splits, lengths, duplicates, contamination, and the report of all that."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, byte_level

from smalti.base.errors import DataError
from smalti.config.examples import ExamplesConfig
from smalti.data.examples import Example
from smalti.data.examples.folder import write_examples
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.tune.chats.chat_tokenizer import ChatTokenizer, tokenize
from smalti.tune.chats.examples import examples_of
from smalti.tune.chats.report import ExamplesReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "tokenizer.json").write_text(byte_level(("<|im_start|>", "<|im_end|>", "<eos>")).to_str())
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (place / "chat_template.jinja").write_text(FAMILIES["chatml"].template)
    return place


def chat(*texts: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def read(
    tmp_path: Path, folder: Path, rows: list[dict[str, Any]], *, max_tokens: int | None = None, **fields: Any
) -> tuple[list[tuple[str, Example]], ExamplesReport]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = ExamplesReport()
    config = ExamplesConfig(**{"files": (str(path),), "heldout_frac": 0, **fields})
    return list(examples_of(config, folder, report, max_tokens=max_tokens)), report


def texts(examples: list[tuple[str, Example]], folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(ids, skip_special=False) for _, example in examples for ids, _ in example.sequences]


def test_examples_are_those_of_tokenize_and_are_counted(tmp_path: Path, folder: Path) -> None:
    chats = [chat("q", "a"), chat("é", "ab", "x", "c", system="s"), chat("q", "a"), chat("q", "b")]
    examples, report = read(tmp_path, folder, [{"messages": messages} for messages in chats])
    kept = [chats[0], chats[1], chats[3]]
    assert [tuple(map(list, example.sequences[0])) for _, example in examples] == [
        tokenize(messages, folder) for messages in kept
    ]
    assert [example.n_loss_bytes for _, example in examples] == [1, 3, 1]
    assert (report.rows, report.duplicates.n) == (4, 1)
    assert report.duplicates.first == [f"{tmp_path}/rows.jsonl:3"]
    counts = report.splits["train"]
    assert counts.examples == 3
    assert counts.loss_tokens == sum(sum(mask) for _, example in examples for _, mask in example.sequences) == 9
    record = write_examples(tmp_path / "out", (example for _, example in examples), load_tokenizer(folder))
    assert (record.n_tokens, record.n_loss_tokens) == (counts.tokens, counts.loss_tokens)
    assert any(name == "duplicates" for name, _ in report.rows_of_table())
    lengths = sorted(len(ids) for _, example in examples for ids, _ in example.sequences)
    written = {"median": lengths[1], "p95": lengths[2], "max": lengths[2]}
    assert report.to_json()["splits"]["train"]["lengths"] == written


def test_without_dedup_equal_examples_stay_and_no_digest_is_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("smalti.tune.chats.examples._digest")
    rows = [{"messages": chat("q", "a")}] * 3
    examples, report = read(tmp_path, folder, rows, dedup=False)
    assert (len(examples), report.duplicates.n) == (3, 0)


def test_a_held_out_prompt_is_never_in_training(tmp_path: Path, folder: Path) -> None:
    prompts = [f"question {number % 40}" for number in range(120)]
    rows = [
        {"messages": chat(prompt.upper() if n > 80 else prompt, f"answer {n}", "more", "yes", system="s" * (n % 2))}
        for n, prompt in enumerate(prompts)
    ]
    examples, report = read(tmp_path, folder, rows, heldout_frac=0.3)
    of_prompt: dict[str, set[str]] = {}
    for (split, _), prompt in zip(examples, prompts, strict=True):
        of_prompt.setdefault(prompt, set()).add(split)
    assert all(len(splits) == 1 for splits in of_prompt.values())
    assert 20 < report.splits["heldout"].examples < 60


def test_long_chats_lose_their_oldest_turns(tmp_path: Path, folder: Path) -> None:
    messages = chat(*(f"{'q' * 5}{n}" if n % 2 == 0 else f"{'a' * 5}{n}" for n in range(10)), system="s")
    shorter = [messages[0], *messages[5:]]
    limit = len(tokenize(shorter, folder)[0]) - 1
    for max_tokens, expected in ((limit, shorter), (limit - 1, [messages[0], *messages[7:]])):
        examples, report = read(tmp_path, folder, [{"messages": messages}], max_tokens=max_tokens)
        assert tuple(map(list, examples[0][1].sequences[0])) == tokenize(expected, folder)
        assert (report.truncated.n, report.too_long.n) == (1, 0)
    rows = [{"messages": messages}, {"messages": chat("q", "a" * 200)}, {"messages": chat("q", "a")}]
    examples, report = read(tmp_path, folder, rows, max_tokens=60, too_long="drop")
    assert (len(examples), report.too_long.n, report.truncated.n) == (1, 2, 0)
    examples, report = read(tmp_path, folder, rows, max_tokens=60)
    assert (len(examples), report.too_long.first) == (2, [f"{tmp_path}/rows.jsonl:2"])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the example has \d+ tokens(.|\n)*too_long=truncate"):
        read(tmp_path, folder, rows, max_tokens=60, too_long="stop")


def test_pairs_share_their_prompt_and_its_truncation(tmp_path: Path, folder: Path) -> None:
    prompt = chat("old" * 9, "older" * 9, "new", system="s")
    row = {"prompt": prompt, "chosen": chat("", "good")[1:], "rejected": chat("", "very bad")[1:], "margin": 0.5}
    short = [prompt[0], prompt[3]]
    wanted = [tokenize([*short, *row[name]], folder) for name in ("chosen", "rejected")]
    limit = sum(len(ids) - 1 for ids, _ in wanted)
    ((_, example),), report = read(tmp_path, folder, [row], max_tokens=limit)
    assert [tuple(map(list, sequence)) for sequence in example.sequences] == wanted
    assert (example.values, report.truncated.n) == ({"margin": 0.5}, 1)
    _, report = read(tmp_path, folder, [row, {**row, "prompt": "q"}], max_tokens=limit - 1)
    assert (report.too_long.n, report.splits["train"].examples) == (1, 1)


@pytest.mark.slow
def test_each_turn_is_an_example_of_its_own(tmp_path: Path, folder: Path) -> None:
    messages = chat("a", "b", "c", "d")
    examples, _ = read(tmp_path, folder, [{"messages": messages}], turns="each")
    assert [example.id for _, example in examples] == ["rows.jsonl:1#1", "rows.jsonl:1#3"]
    assert tuple(map(list, examples[0][1].sequences[0])) == tokenize(messages[:2], folder)
    assert tuple(map(list, examples[1][1].sequences[0])) == tokenize(messages, folder, last_turn=True)
    examples, _ = read(tmp_path, folder, [{"messages": messages}], roles=("user", "assistant"))
    ids, mask = examples[0][1].sequences[0]
    tokenizer = load_tokenizer(folder)
    left = [token for token, flag in zip(ids, mask, strict=True) if not flag]
    # Of another role all that the template writes is in the loss, but for the first token, which nothing predicts.
    assert tokenizer.decode(left, skip_special=False) == "<|im_start|>" + "\n<|im_start|>assistant\n\n" * 2


def test_texts_and_completions_without_a_template(tmp_path: Path, folder: Path) -> None:
    examples, report = read(tmp_path, folder, [{"text": "who is there"}, {"text": "a" * 99}], max_tokens=20)
    assert report.template == ""
    assert texts(examples, folder) == ["who is there<eos>", "a" * 21]
    assert [list(mask) for _, mask in (example.sequences[0] for _, example in examples)][1] == [0] + [1] * 20
    assert [example.n_loss_bytes for _, example in examples] == [12, 21]
    rows = [{"prompt": "def f(", "completion": "x):\n"}]
    examples, report = read(tmp_path, folder, rows, template="none")
    assert report.template == "none"
    ids, mask = examples[0][1].sequences[0]
    assert texts(examples, folder) == ["def f(x):\n<eos>"]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m], skip_special=False) == "x):\n<eos>"


@pytest.mark.slow
def test_rows_that_the_template_rejects_are_named_or_dropped(tmp_path: Path, folder: Path) -> None:
    rows = [{"messages": chat("q", "a", system="s")}, {"messages": chat("q", "a")}]
    template = tmp_path / "no_system.jinja"
    template.write_text(
        "{{ raise_exception('no system') if messages[0].role == 'system' }}" + FAMILIES["chatml"].template
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template no_system.jinja does not take .* no system"):
        read(tmp_path, folder, rows, template=str(template))
    examples, report = read(tmp_path, folder, rows, template=str(template), unreadable="drop")
    assert (len(examples), report.unreadable.n) == (1, 1)
    with pytest.raises(DataError, match=r"no training example is left of the 1 rows(.|\n)*unreadable: 1"):
        read(tmp_path, folder, rows[:1], template=str(template), unreadable="drop")
    weighted = [{**message, "weight": 0} for message in chat("q", "a")]
    with pytest.raises(DataError, match="no message is in the loss"):
        read(tmp_path, folder, [{"messages": weighted}])


@pytest.mark.slow
def test_rows_that_hold_an_item_of_an_evaluation_are_dropped(tmp_path: Path, folder: Path) -> None:
    question = "which of the seven small towns beside the long river has the oldest bridge of stone"
    (tmp_path / "task.jsonl").write_text(json.dumps({"context": question, "continuation": "the third one"}))
    (tmp_path / "task.yaml").write_text("{kind: exact, file: task.jsonl}")
    rows = [{"messages": chat(text, "a")} for text in ("q", f"Tell me: {question.upper()}?", "the long river")]
    examples, report = read(tmp_path, folder, rows, decontaminate=(str(tmp_path / "task.yaml"),))
    assert [example.id for _, example in examples] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert report.contaminated.first == [f"{tmp_path}/rows.jsonl:2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["text", "tokens"])
def test_chatml_is_served_as_it_was_trained(name: str, tmp_path: Path) -> None:
    from smalti.data.tokenizer.chat import load_chat

    controls, end = {"tokens": (("<|im_start|>", "<|im_end|>"), "<|im_end|>"), "text": ((), "<eos>")}[name]
    place = tmp_path
    (place / "tokenizer.json").write_text(byte_level((*controls, "<eos>")).to_str())
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<eos>"}))
    chats = ChatTokenizer(place, "chatml")
    assert chats.tokenizer.decode([chats.end_id], skip_special=False) == end
    chats.write_to(place)
    messages = chat("\n\nq", "a")
    served = load_chat(place).prompt_ids(messages[:1], chats.tokenizer, 0)
    ids, mask = tokenize(messages, place)
    assert ids[: len(served)] == served
    assert chats.tokenizer.decode(ids, skip_special=False) == (
        f"<eos><|im_start|>user\n\n\nq{end}\n<|im_start|>assistant\na{end}\n"
    )
    assert [token for token, flag in zip(ids, mask, strict=True) if flag][-1] == chats.end_id
    ends = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
    assert ends == list(dict.fromkeys([chats.tokenizer.eod_id, chats.end_id]))
